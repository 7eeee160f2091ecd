"""A rank that dies at a random moment is named by all others, as the only cause. More: see ci/soak."""

from __future__ import annotations

import itertools
import re
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from ..helpers.requirements import need_modules
from .soak.faults import BACKWARD, CALL, draw
from .soak.judge import allowed_seconds, faults_of
from .soak.world import KINDS, run_world

COUNT = 5


@pytest.mark.only_all
@pytest.mark.parametrize("job", ["torch", "torch-mpi", "horovod", "horovod-mpi"])
def test_all_others_name_the_rank_that_died_and_end(job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    need_modules(*(["horovod"] if "horovod" in job else []), *(["mpi4py"] if "mpi" in job else []))
    if "mpi" in job:
        # With recovery, mpirun lets the others go on.
        launcher = (*KINDS[job].launcher, "--enable-recovery")
        monkeypatch.setitem(KINDS, job, replace(KINDS[job], launcher=launcher))
    drawn = (fault for fault in map(draw, itertools.count()) if fault.hosts == 1)
    kinds, places = ("SIGKILL", "exception", "sys.exit"), (CALL, BACKWARD)
    deaths = (fault for fault in drawn if fault.kind in kinds and fault.place in places)
    for death in itertools.islice(deaths, COUNT):
        fault = replace(death, world=job, stays=True)
        with tempfile.TemporaryDirectory(prefix="soak-") as folder:
            outcome = run_world(fault, Path(folder), allowed_seconds(fault))
        blamed = [
            re.findall(r"(?s)the cause is rank (\d+)\..*missing ranks: (\[.*?\])\.", text)
            for _, text, _ in outcome.others.values()
        ]
        assert not faults_of(fault, outcome), (fault, outcome)
        assert blamed == [[(f"{fault.rank}", f"[{fault.rank}]")]] * (fault.size - 1), (fault, outcome)
