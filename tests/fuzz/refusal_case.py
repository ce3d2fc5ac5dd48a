# SPDX-License-Identifier: Apache-2.0
"""One rank binds a wrong array: every rank hears of it, nothing is written, and the next bind is in order."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from random import Random
from typing import Any

import numpy as np

from tests.fuzz.bind_case import Batch, Tensor, draw_plan, draw_tensors
from tests.fuzz.memory import numpy_dtype
from tests.fuzz.outcome import Outcome, refused
from tests.fuzz.world import World

Arrays = dict[int, dict[str, Any]]
Spoil = Callable[[Batch, Tensor, int, int, tuple[Arrays, Arrays]], bool]


def _put(array: Any, where: tuple[Arrays, Arrays], side: int, rank: int, name: str) -> bool:
    where[side][rank][name] = array
    return True


def _shape(batch: Batch, t: Tensor, side: int, rank: int, arrays: tuple[Arrays, Arrays]) -> bool:
    local = t.sides[side].local_shapes[rank]
    return _put(np.zeros((*local, 3), numpy_dtype(t.dtypes[side])), arrays, side, rank, t.name)


def _wide(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Extents other than 1, which alone tell how elements are ordered."""
    return tuple(n for n in shape if n != 1)


def _flat(batch: Batch, t: Tensor, side: int, rank: int, arrays: tuple[Arrays, Arrays]) -> bool:
    """As many elements in fewer dimensions."""
    local = t.sides[side].local_shapes[rank]
    flat = np.zeros(math.prod(local), numpy_dtype(t.dtypes[side]))
    return len(_wide(local)) > 1 and _put(flat, arrays, side, rank, t.name)


def _swapped(batch: Batch, t: Tensor, side: int, rank: int, arrays: tuple[Arrays, Arrays]) -> bool:
    """As many elements in as many dimensions, of other extents."""
    local = t.sides[side].local_shapes[rank]
    swapped = np.zeros(local[::-1], numpy_dtype(t.dtypes[side]))
    return _wide(local) != _wide(local[::-1]) and _put(swapped, arrays, side, rank, t.name)


def _dtype(batch: Batch, t: Tensor, side: int, rank: int, arrays: tuple[Arrays, Arrays]) -> bool:
    return _put(np.zeros(t.sides[side].local_shapes[rank], "V7"), arrays, side, rank, t.name)


def _missing(batch: Batch, t: Tensor, side: int, rank: int, arrays: tuple[Arrays, Arrays]) -> bool:
    return _put(None, arrays, side, rank, t.name)


def _stranger(batch: Batch, t: Tensor, side: int, rank: int, arrays: tuple[Arrays, Arrays]) -> bool:
    """A tensor that is not planned."""
    return _put(np.zeros(3), arrays, side, rank, "stranger")


def _read_only(batch: Batch, t: Tensor, side: int, rank: int, arrays: tuple[Arrays, Arrays]) -> bool:
    array = np.zeros(t.sides[side].local_shapes[rank], numpy_dtype(t.dtypes[side]))
    array.flags.writeable = False
    return side == 1 and _put(array, arrays, side, rank, t.name)


def _broadcast(batch: Batch, t: Tensor, side: int, rank: int, arrays: tuple[Arrays, Arrays]) -> bool:
    local, kind = t.sides[side].local_shapes[rank], numpy_dtype(t.dtypes[side])
    array = np.ndarray(local, kind, bytearray(kind.itemsize), 0, (0,) * len(local))
    return side == 1 and math.prod(local) > 1 and _put(array, arrays, side, rank, t.name)


def _over_source(batch: Batch, t: Tensor, side: int, rank: int, arrays: tuple[Arrays, Arrays]) -> bool:
    """The destination of one tensor where the source of any lies."""
    return _over(batch, t, side, rank, arrays, 0)


def _over_destination(batch: Batch, t: Tensor, side: int, rank: int, arrays: tuple[Arrays, Arrays]) -> bool:
    """Two tensors arrive in one place."""
    return _over(batch, t, side, rank, arrays, 1)


def _filled(t: Tensor, rank: int) -> bool:
    """Whether every element of a destination array is written."""
    side = t.sides[1]
    written = [places for _, places in side.flat[rank]]
    return any(p is None for p in written) or sum(len(p) for p in written if p is not None) == math.prod(
        side.local_shapes[rank]
    )


def _over(batch: Batch, t: Tensor, side: int, rank: int, arrays: tuple[Arrays, Arrays], other: int) -> bool:
    if side == 0:
        return False
    local, kind = t.sides[side].local_shapes[rank], numpy_dtype(t.dtypes[side])
    need = math.prod(local) * kind.itemsize
    for name, view in batch.arenas[other][rank].views.items():
        others = [x for x in batch.tensors if x.name == name]
        if not all(_filled(x, rank) for x in (t, *(others if other else ()))):
            continue  # what lies in the gaps of an array may well be another's
        if view.size and name != t.name and view.nbytes >= need and view.flags.c_contiguous:
            memory = view.reshape(-1).view(np.uint8)
            return _put(np.ndarray(local, kind, memory.data), arrays, side, rank, t.name)
    return False


SPOILS: dict[str, Spoil] = {
    "too many dimensions": _shape,
    "flat": _flat,
    "swapped extents": _swapped,
    "another dtype": _dtype,
    "none": _missing,
    "a stranger": _stranger,
    "read-only": _read_only,
    "broadcast": _broadcast,
    "over a source": _over_source,
    "over a destination": _over_destination,
}


def refusal_case(world: World, rng: Random, seed: str, chosen: Collection[int] | None = None) -> Outcome:
    """Some mistakes, one after the other, and then a run."""
    outcome = Outcome()
    tensors = draw_tensors(rng, world.size, rng.randint(1, 4), 3, device=world.on_device)
    batch = Batch(world, tensors, seed)
    plan = draw_plan(rng, tensors, world.size)
    batch.fill(1, ())
    for _ in range(3):
        name, tensor, side = rng.choice(list(SPOILS)), rng.choice(tensors), rng.randrange(2)
        victim = rng.choice(list(tensor.sides[side].ranks))
        if 0 not in tensor.sides[side].local_shapes[victim]:
            _try(world, batch, plan, (name, tensor, side, victim), outcome)
    batch.fill(2)
    with plan.bind(world.transport, *batch.given()) as bound:
        bound.run()
        bound.wait(world.timeout)
        outcome.wrong += batch.wrong("after the mistakes")
    outcome.counts += {"problems": len(tensors), "plans": 1}
    return outcome


def _try(
    world: World, batch: Batch, plan: Any, mistake: tuple[str, Tensor, int, int], outcome: Outcome
) -> None:
    name, tensor, side, victim = mistake
    what = f"{name}: {tensor.name} on rank {victim}, side {side}: {tensor.transfer}"
    arrays = batch.arrays(0), batch.arrays(1)
    spoilt = victim in world.ranks and SPOILS[name](batch, tensor, side, victim, arrays)
    if not any(world.gather(spoilt, what)):  # it cannot be made here
        return
    given = [world.given(arrays[s]) for s in (0, 1)]
    outcome.wrong += refused(world, lambda: plan.bind(world.transport, *given), what)
    outcome.wrong += batch.wrong(what)
    outcome.counts["refusals"] += 1
