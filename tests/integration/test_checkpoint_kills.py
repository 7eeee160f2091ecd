"""A rank that is killed while it saves leaves a complete checkpoint, of all ranks, and loses few steps."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ..helpers import killed_runs, killed_shards
from ..helpers.killed_runs import EVERY, STEPS
from ..helpers.world import ROOT

pytestmark = [pytest.mark.only_all, pytest.mark.timeout(960)]


def made(module: ModuleType, folder: Path, count: int, seconds: int) -> list[Any]:
    """Return what the program `module` prints of so many runs, which must take no longer."""
    command = [sys.executable, "-m", module.__name__, str(folder), str(count), "0"]
    variables = {**os.environ, "OMP_NUM_THREADS": "1"}  # else ranks warn of too many threads
    ended = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=seconds)
    assert (ended.returncode, ended.stderr) == (0, "")
    runs = [json.loads(line) for line in ended.stdout.splitlines()]
    assert len(runs) == count
    return runs


def test_50_killed_runs_resume_from_a_complete_checkpoint(tmp_path: Path) -> None:
    runs = made(killed_runs, tmp_path, 50, 200)
    for run in runs:
        assert run["ended_by"] in ("SIGKILL", "an error"), run
        # An asynchronous save that was running is lost as well.
        assert 0 <= run["steps"] - run["restored"] <= EVERY * (1 + run["asynchronous"]), run
        assert run["same"], run
        assert {"step-000000009.pt", "step-000000012.pt"} <= set(run["left"]), run
        assert all(name.startswith("step-") for name in run["left"]), run
    # The kills must be at many different moments, or this test shows nothing.
    assert sum(run["ended_by"] == "SIGKILL" for run in runs) >= 37
    assert {run["restored"] for run in runs} >= {0, 3, 6, 9, STEPS}


def test_20_runs_with_shards_resume_as_if_undisturbed(tmp_path: Path) -> None:
    runs, last, every = made(killed_shards, tmp_path, 20, 900), killed_shards.STEPS, killed_shards.EVERY
    for run in runs:
        assert run["ended"].pop(run["victim"]) == -9, run
        assert set(run["ended"]) <= {3, 4}, run
        assert run["difference"] <= (0.0 if run["ranks"] == killed_shards.RANKS else 1e-10), run
        assert run["left"] == [f"step-{step:09d}" for step in (last - every, last)], run
    # The kills must be at many different moments, or this test shows nothing.
    assert {run["restored"] for run in runs} >= {0, every, last - every}
    assert {run["victim"] for run in runs} == set(range(killed_shards.RANKS))
