# SPDX-License-Identifier: Apache-2.0
"""`Refit.verify`: what damage it sees, wherever the destination keeps its parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from .sessions import holds, moved, needs, sharded, together, values
from .test_families import DESTINATIONS, SOURCES, side

FOUR, EIGHT = range(4), range(4, 8)


def swap_rows(a: Any) -> None:
    a[[0, 1]] = a[[1, 0]]


def swap_columns(a: Any) -> None:
    a[:, [0, 2]] = a[:, [2, 0]]


def change_a_byte(a: Any) -> None:
    a.view(np.uint8)[-1, -1] ^= 1


def add_and_take(a: Any) -> None:
    """The plain sum stays what it was."""
    a[0, 0] += 1
    a[1, 1] -= 1


def leave_out(a: Any) -> None:
    a.fill(0)


def shift(a: Any) -> None:
    a[...] = np.roll(a.copy(), 1)


DAMAGE: list[Callable[[Any], None]] = [
    swap_rows,
    swap_columns,
    change_a_byte,
    add_and_take,
    leave_out,
    shift,
]


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("dim", [0, 1])
def test_damage_is_seen(damage: Callable[[Any], None], dim: int) -> None:
    full, names = values((12, 16), np.int32), ["a", "b", "c"]
    wanted = together(*[needs(sharded(full.shape, EIGHT, dim), np.int32, n) for n in names])
    made = moved(together(*[holds(sharded(full.shape, FOUR, 0), full, n) for n in names]), wanted)
    damage(wanted[6][1].array)
    assert made.verify() == ["b"]
    assert made.verify(only=["a", "c"]) == []
    made.run()
    made.wait()
    assert made.verify() == []


def test_equal_values_in_other_places() -> None:
    """A tensor of few values: only the places tell."""
    full = values((64, 8)) % 2
    wanted = needs(sharded(full.shape, EIGHT))
    made = moved(holds(sharded(full.shape, FOUR), full), wanted)
    wanted[5][0].array[3, [0, 1]] = wanted[5][0].array[3, [1, 0]]
    assert made.verify() == ["w"]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_low_bits_of_a_wider_destination(dtype: Any) -> None:
    """They did not cross, and are not the source's if they are not zero."""
    full = (values((8, 4), np.float32) / 3).astype(ml_dtypes.bfloat16)
    wanted = needs(sharded(full.shape, EIGHT), dtype)
    made = moved(holds(sharded(full.shape, FOUR), full), wanted, cast=True)
    wanted[4][0].array.view(np.uint8)[0, 0] ^= 1
    assert made.verify() == ["w"]


def test_elements_of_many_bytes() -> None:
    full = values((8, 3), np.complex128)
    wanted = needs(sharded(full.shape, EIGHT), np.complex128)
    made = moved(holds(sharded(full.shape, FOUR), full), wanted)
    wanted[4][0].array[0, 0] = complex(0, 1)
    assert made.verify() == ["w"]


def test_every_array_of_real_storage_is_looked_at() -> None:
    from nccl_m2n import LocalTransport, Refit, Topology

    trainer, _ = side("mla", SOURCES["megatron tp2 pp2 ep2"], 0)
    generator, _ = side("mla", DESTINATIONS["vllm tp2 pp2 dp2"], 8)
    both = trainer.parameters, generator.parameters
    with Refit(LocalTransport(16), *both, Topology.regular(16, 4)) as made:
        made.run()
        made.wait()
        assert made.verify() == []
        for name, array in list(generator.states[13].items())[::3]:
            before = array[(0,) * array.ndim]
            array[(0,) * array.ndim] = -5
            assert len(made.verify()) == 1, name
            array[(0,) * array.ndim] = before
