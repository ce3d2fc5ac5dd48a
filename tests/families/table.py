# SPDX-License-Identifier: Apache-2.0
"""The table of `docs/models.md`: ``python -m tests.families.table`` prints it."""

from __future__ import annotations

import re
from collections.abc import Iterator

from nccl_m2n.errors import M2nError
from nccl_m2n.models import Manifest
from nccl_m2n.models.families import GENERATORS
from nccl_m2n.sharding import Parallelism, layouts
from tests.families import tiny

SIZES = ("tp=4", "tp=2,pp=2", "fsdp=3,tp=2", "ep=4,dp=4", "tp=8,dp=2")
# Routers, norms and positional tables are whole everywhere, and so are a model's single vectors.
_SMALL = re.compile(r"norm|router|\.gate\.|pos|position|wpe|ln_|layernorm")
# What the engines themselves have whole on every rank: vLLM's ReplicatedLinear, Megatron's TELinear, patches.
ENGINES_OWN = re.compile(
    r"_a_proj|kv_a_proj|\.indexer\.|patch_|pooler|lm_head\.dense|token_type|per_layer|[fg]_a_proj|projector|eh_proj"
)


def passed(manifest: Manifest, sizes: str) -> bool:
    """Whether every parameter has a layout, and every element of it a rank."""
    try:
        placed = layouts(manifest, Parallelism.parse(sizes))
    except M2nError:
        return False
    return all(len(layout.partition.holders) or not layout.shape for layout in placed.values())


def whole(manifest: Manifest, sizes: str = "tp=4") -> dict[str, int]:
    """Bytes of the matrices that every rank has all of, but for routers, norms and positional tables."""
    placed = layouts(manifest, Parallelism.parse(sizes))
    return {
        name: info.nbytes
        for name, info in manifest.items()
        if len(info.shape) > 1
        and not _SMALL.search(name)
        and all(placed[name].local_shape(rank) == info.shape for rank in placed[name].ranks)
    }


def described(family: str) -> bool:
    """Whether the configuration gives the names and shapes of the checkpoint."""
    manifest = tiny.models()[family].manifest
    if family not in GENERATORS:
        return False
    made = Manifest.from_config(manifest.config or {}, **({"mtp": False} if family == "deepseek_v3" else {}))
    return {n: i.shape for n, i in made.items()} == {n: i.shape for n, i in manifest.items()}


def rows() -> Iterator[str]:
    """The table, line by line."""
    yield "| family | `config.json` | divided, of five ways | whole at TP4 | of it, by the engines too |"
    yield "|---|---|---|---|---|"
    for family, one in sorted(tiny.models().items()):
        lost = whole(one.manifest)
        own = sum(nbytes for name, nbytes in lost.items() if ENGINES_OWN.search(name))
        shares = [f"{nbytes / one.manifest.nbytes:.1%}" for nbytes in (sum(lost.values()), own)]
        count = sum(passed(one.manifest, sizes) for sizes in SIZES)
        yield f"| {family} | {'yes' if described(family) else '–'} | {count} | {shares[0]} | {shares[1]} |"


if __name__ == "__main__":
    print("\n".join(rows()))
