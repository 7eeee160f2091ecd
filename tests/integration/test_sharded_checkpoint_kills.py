"""A rank that is killed while it saves its part leaves a complete checkpoint of all ranks, and loses few steps."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ..helpers.killed_shards import EVERY, RANKS, STEPS
from ..helpers.world import ROOT

RUNS, SECONDS = 20, 900


@pytest.mark.only_all
@pytest.mark.timeout(SECONDS + 60)
def test_60_killed_runs_resume_as_if_undisturbed(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.helpers.killed_shards", str(tmp_path), str(RUNS), "0"]
    variables = {**os.environ, "OMP_NUM_THREADS": "1"}  # else ranks warn of too many threads
    ended = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=SECONDS)
    assert (ended.returncode, ended.stderr) == (0, "")
    runs = [json.loads(line) for line in ended.stdout.splitlines()]
    assert len(runs) == RUNS
    for run in runs:
        assert run["ended"].pop(run["victim"]) == -9, run
        assert set(run["ended"]) <= {3, 4}, run
        assert run["difference"] <= (0.0 if run["ranks"] == RANKS else 1e-10), run
        assert run["left"] == [f"step-{step:09d}" for step in (STEPS - EVERY, STEPS)], run
    # The kills must be at many different moments, or this test shows nothing.
    assert {run["restored"] for run in runs} >= {0, EVERY, STEPS - EVERY}
    assert {run["victim"] for run in runs} == set(range(RANKS))
