"""The scripts of docs/ray.md under real Ray, which is not installed with the other packages: it is 0.5 GB."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ..helpers.page_blocks import blocks
from ..helpers.script_launch import finish
from ..helpers.world import ROOT

PAGE = (ROOT / "docs" / "ray.md").read_text()


@pytest.mark.only_all
def test_the_workers_of_ray_train_are_the_ranks_of_one_world(tmp_path: Path) -> None:
    script, shown, _ = blocks(PAGE)
    assert shown.text.strip() in run_on_ray(script.text, tmp_path)


@pytest.mark.only_all
def test_exec_in_a_worker_of_ray_train_is_a_rank_of_one_world(tmp_path: Path) -> None:
    script, _, train = blocks(PAGE)
    (tmp_path / "torch_script.py").write_text(
        "import torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "ranks = [None] * dist.get_world_size()\n"
        "dist.all_gather_object(ranks, dist.get_rank())\n"
        "print(f'rank {dist.get_rank()} of {ranks}', flush=True)\n"
    )
    start = script.text[script.text.index("if __name__") :]
    imports = "import ray.train\nfrom ray.train.torch import TorchTrainer\n"
    text = imports + train.text.replace("/path/to/train.py", str(tmp_path / "torch_script.py")) + start
    output = run_on_ray(text, tmp_path)
    assert "rank 0 of [0, 1]" in output
    assert "rank 1 of [0, 1]" in output


def run_on_ray(script: str, folder: Path) -> str:
    """Run a script that starts Ray by itself, and return its output."""
    pytest.importorskip("ray.train", reason="needs `pip install 'ray[train]'`")
    (folder / "train_on_ray.py").write_text(script)
    variables = {"HOME": str(folder), "RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0"}
    return finish([sys.executable, "train_on_ray.py"], variables, seconds=200, folder=folder).check()
