# SPDX-License-Identifier: Apache-2.0
"""What changed of a chunk, written and read: every form, every unit, to the last byte."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nccl_m2n.execution.delta.entries import UNITS, changed_units, decode, encode
from nccl_m2n.planning.delta_sizes import DENSE, LIST, MAP, SECTION, TILE, wire_sizes


def naive_size(nbytes: int, unit: int, entries: int) -> tuple[int, int]:
    """The shortest of three forms, said once more."""

    def padded(n: int) -> int:
        return (n + SECTION - 1) // SECTION * SECTION

    units = nbytes // unit
    head = padded(4 * ((units + TILE - 1) // TILE))
    listed = head + padded(2 * entries) + padded(entries * unit)
    mapped = head + padded((units + 7) // 8) + padded(entries * unit)
    dense = padded(nbytes)
    if entries == 0:
        return LIST, 0
    best = min(listed, mapped, dense)
    return (LIST if listed == best else MAP if mapped == best else DENSE), best


@given(st.sampled_from(sorted(UNITS)), st.integers(1, 9000), st.floats(0, 1), st.integers(0, 1000))
def test_what_is_written_is_read(unit: int, units: int, share: float, seed: int) -> None:
    random = np.random.default_rng(seed)
    block = random.integers(0, 256, units * unit, np.uint8)
    baseline = block.copy()
    chosen = np.flatnonzero(random.random(units) < share)
    baseline.view(UNITS[unit])[chosen] ^= 1
    changed = changed_units(block, baseline, unit)
    assert changed.tolist() == chosen.tolist()
    sizes = wire_sizes(np.array([len(block)]), np.array([unit]), np.array([len(changed)]))
    form, nbytes = int(sizes.form[0]), int(sizes.nbytes[0])
    assert (form, nbytes) == naive_size(len(block), unit, len(changed))
    memory = np.full(nbytes + 8, 0xAB, np.uint8)
    encode(block, changed, unit, form, memory[:nbytes])
    assert (memory[nbytes:] == 0xAB).all()
    if form == DENSE:
        assert memory[: len(block)].tolist() == block.tolist()
    else:
        where, values = decode(memory[:nbytes], units, len(changed), unit, form)
        baseline.view(UNITS[unit])[where] = values
        assert baseline.tolist() == block.tolist()


@pytest.mark.parametrize(
    ("share", "form", "most"),
    [(0.01, LIST, 0.026), (0.03, LIST, 0.072), (0.1, MAP, 0.17), (0.2, MAP, 0.27), (0.95, DENSE, 1.0)],
)
def test_bfloat16_takes_little(share: float, form: int, most: float) -> None:
    nbytes = 8 << 20
    sizes = wire_sizes(np.array([nbytes]), np.array([2]), np.array([round(nbytes / 2 * share)]))
    assert sizes.form.tolist() == [form]
    assert sizes.nbytes[0] <= most * nbytes


def test_the_list_gives_way_to_the_map_where_a_bit_a_unit_is_shorter() -> None:
    units = 1 << 20
    entries = np.arange(units // 32, units // 8, units // 512)
    forms = wire_sizes(np.full(len(entries), 2 * units), np.full(len(entries), 2), entries).form
    assert forms.tolist() == [LIST if e <= units // 16 else MAP for e in entries.tolist()]
