"""`dualdist hang` shows where the ranks of real launchers are: SIGUSR2 reaches them in the ways of docs/hang.md.

The behaviour itself is tested in behaviours/test_hang.py.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import signal
import sys
from pathlib import Path

import pytest

from dualdist.cli import main

from ..helpers.files import wait_for
from ..helpers.forks import fork_variables, forked
from ..helpers.requirements import need_modules
from ..helpers.script_launch import LAUNCHERS, MARK, Script, abort, popen
from ..helpers.slurm_cluster import Slurm

SCRIPT = """\
import sys
import dualdist as hvd

def load_batch():
    open(sys.argv[1], "rb").read(1)

hvd.init()
if hvd.rank() == 1:
    load_batch()
hvd.barrier()
"""


@pytest.mark.parametrize("launcher", ["mpirun", "srun"])
def test_all_ranks_show_where_they_are_when_the_launcher_is_asked(
    launcher: str, script: Script, tmp_path: Path, capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    need_modules("mpi4py", "horovod")
    slurm: Slurm | None = request.getfixturevalue("slurm") if launcher == "srun" else None
    start = (*LAUNCHERS["mpirun"].command[:-1],) if slurm is None else ("srun", "-N", "2", "-n", "2")
    os.mkfifo(tmp_path / "batches")
    batches, path, mark = os.open(tmp_path / "batches", os.O_RDWR), script(SCRIPT), secrets.token_hex(8)
    variables = {"DUALDIST_DUMP_DIR": str(tmp_path / "dumps"), "DUALDIST_STALL_WARN_SECONDS": "0.2", MARK: mark}
    variables |= fork_variables() | ({} if slurm is None else dict(slurm.environment))
    process = popen(forked([*start, sys.executable, path, str(tmp_path / "batches")]), variables)
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, batches)
        stack.callback(abort, mark, process)
        assert process.stdout is not None
        written = next((line for line in process.stdout if b"Stalled for" in line), b"")
        assert b"missing ranks: [1]" in written  # rank 0 waits for it
        if slurm is None:
            process.send_signal(signal.SIGUSR2)
        else:
            slurm.ask("scancel", "--signal=USR2", slurm.ask("squeue", "--noheader", "--steps", "--format=%i"))
        wait_for(tmp_path / "dumps" / f"rank-{rank}.json" for rank in range(2))
        os.write(batches, b".")
        output, _ = process.communicate()
        assert process.returncode == 0, output
    assert main(["hang", str(tmp_path / "dumps")]) == 0
    found = capsys.readouterr().out
    assert re.match(r"2 of 2 ranks wrote a file at \S+: a rank received SIGUSR2\.\nRank 1 is behind, on ", found), found
    assert f'. It is in load_batch at {path}:5: open(sys.argv[1], "rb").read(1)\n' in found, found
    assert f"\nRanks [0]: waiting in barrier of set 0, in <module> at {path}:10: hvd.barrier()\n" in found, found
