# SPDX-License-Identifier: Apache-2.0
"""Pictures of layouts: well-formed, complete, and in proportion."""

from __future__ import annotations

import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from nccl_m2n import Box, Layout, LayoutError, Mesh, Replicate, Shard, StridedShard, Topology, Transfer, plan
from nccl_m2n.show import html_layout, svg_layout, svg_reshard, text_layout

FIGURE_1 = Path(__file__).parents[1] / "docs" / "_static" / "figure-1.svg"

ROWS = Layout((8, 8), Mesh([0, 1]), [Shard(0)])
COLUMNS = Layout((8, 8), Mesh([2, 3, 4, 5]), [Shard(1)])

LAYOUTS = [
    Layout((), Mesh.arange((3,)), [Replicate()]),
    Layout((10,), Mesh.arange((4,)), [Shard(0)]),
    Layout((7, 9), Mesh.arange((2, 3)), [Shard(1), Replicate()]),
    Layout((5, 3), Mesh.arange((2, 2)), [StridedShard(0, split_factor=2), Shard(0)]),
    Layout((22, 4), Mesh.arange((4,)), [Shard(0, segments=(11, 11))]),
    Layout((4, 7, 9), Mesh.arange((2, 2, 2)), [Shard(0), Shard(1), Shard(2)]),
    Layout((2, 3, 4, 5), Mesh.arange((2, 3)), [Shard(0), Shard(1)]),
    Layout.from_pieces(
        (8, 8), {0: [Box((0, 0), (3, 8))], 1: [Box((3, 0), (8, 5))], 2: [Box((3, 5), (8, 8))]}
    ),
    Layout.from_pieces((6,), {0: [Box((0,), (4,))], 1: [Box((2,), (6,))]}),  # overlap in part
]


def rectangles(picture: str) -> list[tuple[str, float]]:
    """Title and area of every painted box."""
    found = []
    for element in ElementTree.fromstring(picture).iter("{http://www.w3.org/2000/svg}rect"):
        title = element.find("{http://www.w3.org/2000/svg}title")
        if title is not None:
            found.append((title.text or "", float(element.attrib["width"]) * float(element.attrib["height"])))
    return found


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_picture_names_each_box_and_its_ranks(layout: Layout) -> None:
    titles = [title for title, _ in rectangles(svg_layout(layout))]
    assert len(titles) == len(set(titles))
    for rank in layout.ranks:
        shown = [box_of(title) for title in titles if rank in ranks_of(title)]
        held = [piece.box for piece in layout.pieces(rank) if piece.box.size]
        assert sum(box.size for box in shown) == sum(box.size for box in held)
        assert all(any(box.intersect(piece) == box for piece in held) for box in shown)


def box_of(title: str) -> Box:
    text = title[1 : title.index("]")]
    ends = [part.split(":") for part in text.split(", ") if part]
    return Box(tuple(int(a) for a, _ in ends), tuple(int(b) for _, b in ends))


def ranks_of(title: str) -> set[int]:
    ranks: set[int] = set()
    for run in title.split("rank", 1)[1].removeprefix("s").strip().split(", "):
        first, _, last = run.partition("-")
        ranks |= set(range(int(first), int(last or first) + 1))
    return ranks


def test_areas_are_in_proportion() -> None:
    areas = dict(rectangles(svg_layout(Layout((10, 8), Mesh.arange((4,)), [Shard(0)]))))
    assert areas["[0:3, 0:8]: rank 0"] == pytest.approx(3 * areas["[9:10, 0:8]: rank 3"], rel=0.01)


def test_figure_1_is_what_the_package_draws() -> None:
    assert FIGURE_1.read_text(encoding="utf-8") == svg_reshard(ROWS, COLUMNS)


def test_a_reshard_shows_every_overlap_on_both_sides() -> None:
    titles = sorted(title for title, _ in rectangles(svg_reshard(ROWS, COLUMNS)))
    assert len(titles) == 16
    assert titles[:2] == ["[0:4, 0:2]: held by 0, needed by 2"] * 2


@pytest.mark.parametrize(
    ("layout", "reason"),
    [
        (Layout((4, 0), Mesh([0, 1]), [Shard(0)]), "has no elements"),
        (Layout((4096, 4096), Mesh.arange((64, 64)), [Shard(0), Shard(1)]), "too many boxes"),
        (Layout((64, 2, 2), Mesh.arange((64,)), [Shard(0)]), "too many panels"),
    ],
)
def test_what_cannot_be_drawn_is_said_and_shown_as_text(layout: Layout, reason: str) -> None:
    with pytest.raises(LayoutError, match=reason):
        svg_layout(layout)
    assert layout._repr_html_() == html_layout(layout)
    assert html_layout(layout).startswith("<pre>")


def test_a_reshard_of_two_shapes_is_refused() -> None:
    with pytest.raises(LayoutError, match=r"\(8, 8\) and \(8,\)"):
        svg_reshard(ROWS, Layout((8,), Mesh([0]), [Replicate()]))


def test_a_notebook_shows_the_picture_and_what_it_is() -> None:
    assert "<svg" in ROWS._repr_html_()
    assert f"<figcaption>{ROWS}</figcaption>" in ROWS._repr_html_()


def test_a_plan_shows_the_table_that_it_prints() -> None:
    made = plan([Transfer(ROWS, COLUMNS, name="a <b>")], Topology([[0, 1], [2, 3, 4, 5]]))
    table = ElementTree.fromstring(made._repr_html_())
    caption, head, body = table
    printed = str(made).splitlines()
    assert caption.text == printed[0]
    assert [cell.text for cell in head[0]][1:] == printed[1].split()
    for row, line in zip(body, printed[2:], strict=True):
        assert "".join(row.itertext()).replace(" ", "") == line.replace(" ", "")


def test_text_of_many_ranks_is_cut() -> None:
    text = text_layout(Layout((128, 2), Mesh.arange((64,)), [Shard(0)]))
    assert text.endswith("… and 32 more ranks")
    assert text.count("\n") == 34


def test_pictures_are_imported_only_when_something_is_shown() -> None:
    script = "import sys, nccl_m2n; print(any(name.startswith('nccl_m2n.show') for name in sys.modules))"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"
