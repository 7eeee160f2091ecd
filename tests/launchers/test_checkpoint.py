"""How a run with checkpoints ends: on a signal with the scheduler's exit code, and only after its last save."""

from __future__ import annotations

import contextlib
import os
import secrets
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch

from ..helpers.forks import fork_of, fork_variables, forked
from ..helpers.process_watch import Watched
from ..helpers.requirements import need_modules
from ..helpers.script_launch import LAUNCHERS, MARK, STACKS, abort, finish, launch, started_by
from ..helpers.slurm_cluster import Slurm
from ..helpers.world import ROOT

PREEMPTED = """\
import os, signal, sys, dualdist as hvd
hvd.init()
manager = hvd.checkpoint.CheckpointManager(sys.argv[1], {"value": 5}, exit_code=75)
if hvd.rank() == hvd.size() - 1:
    os.kill(os.getpid(), signal.SIGUSR1)
manager.step()
print("went on")
"""

LEFT_EARLY = """\
import concurrent.futures.thread, os, sys, threading, dualdist as hvd

ended, replace = threading.Event(), os.replace
threading._register_atexit(ended.set)  # called first when the script has ended

def replace_late(source, target):
    ended.wait()
    replace(source, target)

hvd.init()
state = {"value": 5}
manager = hvd.checkpoint.CheckpointManager(sys.argv[1], state, asynchronous=True)
manager.steps = 1
os.replace = replace_late
manager.save()
sys.exit("the end")
"""


@pytest.mark.parametrize("name", ["python", pytest.param("mpirun", marks=pytest.mark.only_ci)])
def test_a_signal_ends_the_job_with_the_code_that_was_set(name: str, tmp_path: Path) -> None:
    ended = launch(name, "-c", PREEMPTED, str(tmp_path / "saved"))
    assert ended.code == 75
    assert "went on" not in ended.output and "Traceback" not in ended.output
    assert torch.load(tmp_path / "saved" / "step-000000001.pt", weights_only=True)["value"] == 5


def test_a_running_save_is_finished_before_the_process_ends(tmp_path: Path) -> None:
    ended = launch("python", "-c", LEFT_EARLY, str(tmp_path / "saved"))
    assert (ended.code, ended.output) == (1, "the end\n")
    assert torch.load(tmp_path / "saved" / "step-000000001.pt", weights_only=True)["value"] == 5


TRAINING = ("-m", "tests.helpers.preempted_training")
DUALDIST_RUN = (sys.executable, "-m", "dualdist", "run", "-np", "2", sys.executable)
ALL, LAUNCHER, OTHERS = "all", "the launcher", "all but the launcher"
SRUN = ("srun", "--kill-on-bad-exit=1", "-N", "1", "-n", "2", sys.executable)


def preempt(
    command: Sequence[str],
    environment: Mapping[str, str],
    folder: Path,
    number: signal.Signals,
    workers: Sequence[str] = ("2",),
    *,
    to: str = ALL,
) -> int:
    """Signal the processes `to` of a training, check that it is saved and resumes, and return its exit code."""
    mark, variables = secrets.token_hex(8), {"OMP_NUM_THREADS": "1", **environment}
    with subprocess.Popen(
        forked([*command, *TRAINING, "train", str(folder), *workers]),
        cwd=ROOT,
        env={**os.environ, **STACKS, **fork_variables(), **variables, MARK: mark},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        text=True,
    ) as launcher:
        assert launcher.stdout is not None
        output = ""
        try:
            for line in launcher.stdout:
                output += line
                print(line, end="")  # for the report of a test that fails
                if "trains" in line:
                    first = fork_of(launcher.pid)
                    pids = started_by(mark)
                    watched = Watched(pids)
                    for pid in pids:
                        if to == ALL or (to == LAUNCHER) == (pid == first):
                            # The launcher, which may be first, may have ended the others by now.
                            with contextlib.suppress(ProcessLookupError):
                                os.kill(pid, number)
            assert "trains" in output
            code = launcher.wait(60)
            assert watched.left() == []
        finally:
            abort(mark, launcher)
    assert f"Signal {int(number)} ({signal.strsignal(number)}) ended the run after step " in output
    resumed = finish([*command, *TRAINING, "compare", str(folder), *workers], variables)
    assert "equal after " in resumed.check()
    return code


@pytest.mark.only_ci(where=lambda name: name in ("horovodrun", "mpirun"))
@pytest.mark.parametrize("name", ["python", "torchrun", "horovodrun", "mpirun"])
def test_a_signal_to_all_processes_of_a_job_saves_it_though_workers_load_data(name: str, tmp_path: Path) -> None:
    launcher = LAUNCHERS[name]
    need_modules(*launcher.modules)
    code = preempt(launcher.command, launcher.environment, tmp_path, signal.SIGTERM)
    assert (code == 75) if name == "python" else code != 0


@pytest.mark.only_ci(where=lambda to, number: (to, number) != (ALL, signal.SIGTERM))
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
@pytest.mark.parametrize("to", [ALL, LAUNCHER, pytest.param(OTHERS, marks=pytest.mark.only_all)])
def test_dualdist_run_that_is_signalled_ends_with_the_code_of_the_saved_run(
    number: signal.Signals, to: str, tmp_path: Path
) -> None:
    assert preempt(DUALDIST_RUN, {}, tmp_path, number, ("2", "persistent"), to=to) == 75


@pytest.mark.only_ci
@pytest.mark.parametrize(("number", "to"), [(signal.SIGTERM, OTHERS), (signal.SIGUSR1, LAUNCHER)])
def test_a_signal_to_a_step_of_slurm_saves_it(number: signal.Signals, to: str, slurm: Slurm, tmp_path: Path) -> None:
    assert preempt(SRUN, slurm.environment, tmp_path, number, to=to) == 75


@pytest.mark.only_ci
@pytest.mark.parametrize("launcher", ["srun", pytest.param("dualdist run", marks=pytest.mark.only_all)])
def test_a_preempted_job_of_slurm_is_requeued_and_resumes(launcher: str, slurm: Slurm, tmp_path: Path) -> None:
    """The script signals the step as `sbatch --signal=USR1@90` does before the time limit."""
    step = ("srun", "-n", "1", *DUALDIST_RUN) if launcher == "dualdist run" else SRUN
    training = shlex.join(forked([*step, *TRAINING]))
    script, log, saved = tmp_path / "job.sh", tmp_path / "log", tmp_path / "saved"
    script.write_text(
        f"""#!/bin/bash
        if [ "$SLURM_RESTART_COUNT" ]; then exec {training} compare {saved} 2; fi
        mkfifo {tmp_path}/lines
        {training} train {saved} 2 > {tmp_path}/lines 2>&1 &
        while read line; do
            echo "$line"
            case $line in *trains) scancel --signal=USR1 "$SLURM_JOB_ID";; esac
        done < {tmp_path}/lines
        wait $!
        """
    )
    options = f"--parsable --requeue --nodes=1 --ntasks=2 --open-mode=append --output={log}"
    submitted = slurm.finish("sbatch", *options.split(), str(script))
    slurm.wait_for_success(submitted.check().strip())
    assert "(User defined signal 1) ended the run after step " in log.read_text()
    assert "equal after " in log.read_text()
