# SPDX-License-Identifier: Apache-2.0
"""Old import paths, which keep working for a while with a warning: modules that moved to other rooms."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

MOVED = {
    "nccl_m2n.cli.meeting": "nccl_m2n.transport.meeting",
    "nccl_m2n.execution.agree": "nccl_m2n.transport.agree",
    "nccl_m2n.layout.pieces": "nccl_m2n.layout.piece_layout",
    "nccl_m2n.planning.places": "nccl_m2n.planning.rank_cells",
    "nccl_m2n.planning.plan": "nccl_m2n.planning.plans",
    "nccl_m2n.refit.checkpoint": "nccl_m2n.models.checkpoint",
    "nccl_m2n.refit.experts": "nccl_m2n.sharding.experts",
    "nccl_m2n.refit.installed": "nccl_m2n.models.find",
    "nccl_m2n.refit.manifest": "nccl_m2n.models.manifest",
    "nccl_m2n.refit.models": "nccl_m2n.models",
    "nccl_m2n.refit.parallelism": "nccl_m2n.sharding.parallelism",
    "nccl_m2n.refit.placing": "nccl_m2n.sharding.model_layouts",
    "nccl_m2n.refit.rules": "nccl_m2n.sharding.rules",
    "nccl_m2n.refit.scales": "nccl_m2n.sharding.companions",
    "nccl_m2n.refit.storage": "nccl_m2n.storage",
    "nccl_m2n.reshard": "nccl_m2n.resharding",
    "nccl_m2n.simulate": "nccl_m2n.simulation",
}
MOVED_NAMES = {
    **dict.fromkeys(("Manifest", "TensorInfo"), "nccl_m2n.models"),
    **dict.fromkeys(("Parallelism", "Rule", "layouts", "load_rules", "rules_for"), "nccl_m2n.sharding"),
}


class _Moved(MetaPathFinder, Loader):
    """Finds what is asked for under an old path at its new one."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        new = new_path(name)
        if new is None:
            return None
        warnings.warn(f"{name} is now {new}; import it from there", DeprecationWarning, stacklevel=2)
        return ModuleSpec(name, self, origin=new)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """A stand-in with the names of the module at the new path."""
        made = ModuleType(spec.name)
        found = importlib.import_module(str(spec.origin))
        made.__dict__.update(
            {k: v for k, v in vars(found).items() if not k.startswith("__") or k == "__all__"}
        )
        made.__path__ = []  # modules within moved along with it
        return made

    def exec_module(self, module: ModuleType) -> None:
        """A function of the package keeps its name, though a module used to have it too."""
        parent, _, child = module.__name__.rpartition(".")
        function = getattr(sys.modules[parent], child, None)
        if callable(function):
            module.__class__ = type("Named", (ModuleType,), {"__call__": staticmethod(function)})


def new_path(name: str) -> str | None:
    """Where a module is now; None for one that did not move."""
    for old, new in MOVED.items():
        if name == old or name.startswith(old + "."):
            return new + name.removeprefix(old)
    return None


def moved_name(package: str, name: str) -> Any:
    """What `package` had under a name that is elsewhere now.

    Raises:
        AttributeError: If it never had one of that name.
    """
    if name not in MOVED_NAMES:
        raise AttributeError(f"module {package!r} has no attribute {name!r}")
    new = MOVED_NAMES[name]
    warnings.warn(
        f"{package}.{name} is now {new}.{name}; import it from there", DeprecationWarning, stacklevel=3
    )
    return getattr(importlib.import_module(new), name)


def install() -> None:
    """Let old paths be found, after all that is really there."""
    if not any(isinstance(finder, _Moved) for finder in sys.meta_path):
        sys.meta_path.append(_Moved())
