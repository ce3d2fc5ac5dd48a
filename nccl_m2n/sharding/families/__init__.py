# SPDX-License-Identifier: Apache-2.0
"""The shipped rules, by the ``model_type`` of a configuration."""

from __future__ import annotations

from nccl_m2n.errors import CommandError
from nccl_m2n.models.config import Config
from nccl_m2n.models.families import closest
from nccl_m2n.models.manifest import Manifest, as_manifest
from nccl_m2n.sharding.families import dense, experts, hybrid, older, vision
from nccl_m2n.sharding.rules import Rule

RULES: dict[str, tuple[Rule, ...]] = {
    **dense.RULES,
    **experts.RULES,
    **hybrid.RULES,
    **older.RULES,
    **vision.RULES,
}


def rules_for(manifest: Manifest, unknown: bool = False) -> tuple[Rule, ...]:
    """The shipped rules of a model: by its configuration's family, or by its names where there is none.

    Args:
        manifest: The model.
        unknown: Give none for a family that is not known, instead of refusing it.

    Raises:
        CommandError: If neither is known.
    """
    as_manifest(manifest)
    family = Config(manifest.config or {}, manifest.label or "the model").family
    if family in RULES:
        return RULES[family]
    if family is None:  # what these do not know by name, they refuse
        if any("encoder.layer." in name for name in manifest):
            return older.RULES["bert"]
        if any(".self_attn.sinks" in name for name in manifest):
            return experts.GPT_OSS
        if any(name.startswith("model.layers.") for name in manifest):
            return experts.LATENT
    if unknown:
        return ()
    raise CommandError(
        f"no shipped rules fit {manifest!r} (model_type {family!r}); {closest(family, RULES)}; give rules of your "
        'own (rules=, or --rules FILE: a JSON list such as [{"pattern": "*.q_proj.weight", "tp": 0}, …])'
    )
