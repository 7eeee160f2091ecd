"""A run that is killed while it saves leaves a complete checkpoint, and loses few steps."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ..helpers.killed_runs import EVERY, STEPS
from ..helpers.world import ROOT

RUNS, SECONDS = 50, 200


@pytest.mark.only_all
def test_50_killed_runs_resume_from_a_complete_checkpoint(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.helpers.killed_runs", str(tmp_path), str(RUNS), "0"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
    runs = [json.loads(line) for line in ended.stdout.splitlines()]
    assert len(runs) == RUNS
    for run in runs:
        assert run["ended_by"] in ("SIGKILL", "an error"), run
        # An asynchronous save that was running is lost as well.
        assert 0 <= run["steps"] - run["restored"] <= EVERY * (1 + run["asynchronous"]), run
        assert run["same"], run
        assert {"step-000000009.pt", "step-000000012.pt"} <= set(run["left"]), run
        assert all(name.startswith("step-") for name in run["left"]), run
    # The kills must be at many different moments, or this test shows nothing.
    assert sum(run["ended_by"] == "SIGKILL" for run in runs) >= RUNS * 3 // 4
    assert {run["restored"] for run in runs} >= {0, 3, 6, 9, STEPS}
