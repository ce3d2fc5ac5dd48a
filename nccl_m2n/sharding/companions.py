# SPDX-License-Identifier: Apache-2.0
"""Tensors that belong to a weight and follow it: block scales, packed values, zero points, adapters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nccl_m2n.errors import CommandError
from nccl_m2n.layout import Box, Layout, Piece, Placement, Replicate, Shard
from nccl_m2n.models.config import Config
from nccl_m2n.models.manifest import Manifest

BLOCK = 128  # rows and columns of a scale's block where nothing says it

# What follows the name of a module -> for each dimension the one of the weight (out, in) that it follows.
_FOLLOWS: dict[str, tuple[int | None, ...]] = {
    **dict.fromkeys(("weight_scale_inv", "weight_scale", "weight_packed", "weight_zero_point"), (0, 1)),
    **dict.fromkeys(("qweight", "qzeros", "scales"), (1, 0)),
    **dict.fromkeys(("weight_g_idx", "g_idx"), (1,)),
    **dict.fromkeys(
        ("weight_shape", "input_scale", "weight_scale_2", "weight_global_scale", "input_global_scale"),
        (None,),
    ),
    "lora_A.weight": (None, 1),
    "lora_B.weight": (0, None),
    "lora_magnitude_vector": (0,),
}
_LAST = {suffix.rpartition(".")[2] for suffix in _FOLLOWS}
_PREFIX = "base_model.model."  # before the names of adapters


@dataclass(frozen=True)
class Companion:
    """What a tensor is to its weight.

    Args:
        weight: The weight's name, whether or not the model has a tensor of that name.
        shape: The weight's shape (out, in).
        steps: For each dimension the weight's dimension that it follows, and how many of the weight's elements
            one of its own stands for. None for a dimension that is whole everywhere.
    """

    weight: str
    shape: tuple[int, ...]
    steps: tuple[tuple[int, int] | None, ...]


def companion_of(name: str, manifest: Manifest, config: Config) -> Companion | None:
    """What a tensor is to a weight, by their names and shapes; None for one that stands by itself.

    Raises:
        CommandError: If its shape does not fit the weight's.
    """
    last = name[name.rfind(".") + 1 :]
    if last not in _LAST or (last == "weight" and ".lora_" not in name):
        return None  # as nearly all
    suffix = next((s for s in _FOLLOWS if name.endswith(f".{s}")), None)
    if suffix is None:
        return None
    module = name.removesuffix(f".{suffix}")
    weight = f"{module}.weight"
    shape = manifest[weight].shape if weight in manifest else _packed_shape(module, manifest, config)
    if shape is None:
        raise CommandError(
            f"{name} belongs to a weight whose shape neither the model nor its configuration says"
        )
    follows, mine = _FOLLOWS[suffix], manifest[name].shape
    if len(mine) != len(follows):  # one for the whole weight, or one for each of its rows
        follows = (0,) if mine == shape[:1] else (None,) * len(mine)
    if suffix in ("scales", "qzeros") and config.quantization.get("desc_act"):
        follows = (None, 0)  # in an order of their own along the columns, so that all are needed
    block = _block(suffix, config)
    steps = tuple(
        None if dim is None else _step(name, dim, shape[dim], extent, None if block is None else block[dim])
        for dim, extent in zip(follows, mine, strict=True)
    )
    return Companion(weight.removeprefix(_PREFIX), shape, steps)


def _step(name: str, dim: int, weight: int, extent: int, block: int | None) -> tuple[int, int] | None:
    if extent == 1 and block is None:
        return None
    usual = (1, BLOCK, 64, 32, 16, -(-weight // max(1, extent)))
    for step in usual if block is None else (block,):
        if -(-weight // step) == extent:
            return dim, step
    raise CommandError(
        f"{name} has {extent} elements for the {weight} of dimension {dim} of its weight: no even share"
    )


def _packed_shape(module: str, manifest: Manifest, config: Config) -> tuple[int, ...] | None:
    """The shape of a weight of which the model has only what stands for it."""

    def shape(suffix: str) -> tuple[int, ...] | None:
        name = f"{module}.{suffix}"
        return manifest[name].shape if name in manifest else None

    down, up = shape("lora_A.weight"), shape("lora_B.weight")
    if down and up:
        return up[0], down[1]
    bits = _bits(config)
    packed, scales, words = shape("weight_packed"), shape("scales"), shape("qweight")
    if packed and bits:
        return packed[0], packed[1] * 32 // bits
    if scales and words and bits:
        transposed = words[1] == scales[1]  # GPTQ packs along the columns, AWQ along the rows
        return scales[1], words[0] * 32 // bits if transposed else words[0]
    return None


def _bits(config: Config) -> int | None:
    """Bits of a packed element."""
    found = config.quantization
    groups = found.get("config_groups")
    if isinstance(groups, Mapping):  # compressed-tensors
        weights = [g.get("weights") for g in groups.values() if isinstance(g, Mapping)]
        found = next((w for w in weights if isinstance(w, Mapping)), {})
    bits = found.get("bits", found.get("num_bits"))
    return bits if isinstance(bits, int) and 0 < bits <= 32 else None


def _block(suffix: str, config: Config) -> tuple[int, int] | None:
    """Rows and columns of a scale's block, where it is said or has always been so."""
    if config.block is not None:
        return config.block
    return (BLOCK, BLOCK) if suffix == "weight_scale_inv" else None


def companion_layout(layout: Layout, companion: Companion, shape: Sequence[int]) -> Layout:
    """Where a companion lies: each rank holds what belongs to its part of the weight.

    Args:
        layout: The weight's layout.
        companion: What it is to the weight.
        shape: The companion's own shape.

    Raises:
        LayoutError: If a rank's part of the weight begins or ends within what one element stands for.
    """
    pieces = {
        rank: tuple(dict.fromkeys(_follow(piece, companion, shape) for piece in layout.pieces(rank)))
        for rank in layout.ranks
    }
    if layout.placements and not any(isinstance(p, Shard) and p.segments for p in layout.placements):
        plain = Layout(shape, layout.mesh, [_turned(p, companion) for p in layout.placements])
        if all(plain.pieces(rank) == held for rank, held in pieces.items()):
            return plain
    return from_pieces(shape, pieces)


def from_pieces(shape: Sequence[int], pieces: Mapping[int, Sequence[Piece | Box]]) -> Layout:
    """A layout of pieces; who has none has no rows of the others' width."""
    empty = {rank: (0, *shape[1:]) for rank, held in pieces.items() if not held}
    return Layout.from_pieces(shape, pieces, empty)


def _turned(placement: Placement, companion: Companion) -> Placement:
    dim = getattr(placement, "dim", None)
    at = [i for i, step in enumerate(companion.steps) if step is not None and step[0] == dim]
    return Shard(at[0]) if dim is not None and at else Replicate()


def _follow(piece: Piece, companion: Companion, shape: Sequence[int]) -> Piece:
    start, stop, offset = [], [], []
    for extent, step in zip(shape, companion.steps, strict=True):
        if step is None:
            start.append(0), stop.append(extent), offset.append(0)  # type: ignore[func-returns-value]
            continue
        dim, n = step
        a, b, at = piece.box.start[dim], piece.box.stop[dim], piece.offset[dim]
        if a % n or at % n or (b % n and b != companion.shape[dim]):
            raise CommandError(
                f"a rank's part of {companion.weight} is [{a}:{b}] of dimension {dim}, cutting the blocks of {n} "
                "that share a scale or a word; choose sizes that divide it at multiples of that"
            )
        start.append(a // n), stop.append(-(-b // n)), offset.append(at // n)  # type: ignore[func-returns-value]
    return Piece(Box(tuple(start), tuple(stop)), tuple(offset))
