"""The script of docs/ray.md under real Ray, which is not installed with the other packages: it is 0.5 GB."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ..helpers.page_blocks import blocks
from ..helpers.script_launch import finish
from ..helpers.world import ROOT


@pytest.mark.only_all
def test_the_workers_of_ray_train_are_the_ranks_of_one_world(tmp_path: Path) -> None:
    pytest.importorskip("ray.train", reason="needs `pip install 'ray[train]'`")
    script, shown = blocks((ROOT / "docs" / "ray.md").read_text())
    (tmp_path / "train_on_ray.py").write_text(script.text)
    variables = {"HOME": str(tmp_path), "RAY_USAGE_STATS_ENABLED": "0"}
    output = finish([sys.executable, "train_on_ray.py"], variables, seconds=200, folder=tmp_path).check()
    assert shown.text.strip() in output
