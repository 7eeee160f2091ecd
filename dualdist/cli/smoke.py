"""The smoke test of `dualdist doctor`: two real processes that join a world and exchange a few numbers.

    python -m dualdist.cli.smoke BACKEND TRANSPORT

is what each process of a cell over MPI runs.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..collectives import allgather, allreduce
from ..launch.environment import without_launchers
from ..lifecycle import init, shutdown
from ..processes.spawning import spawn
from ..types import Sum
from ..world.numbers import backend_name, rank, size, transport_name

__all__ = ("attempt", "smoke")

_SECONDS = 60.0
_PROCESSES = 2


def smoke(cells: Sequence[str], env: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Start every one of `cells` ('backend+transport') and return, for each, the seconds it took or its problem."""
    results = {}
    for cell in cells:
        start = time.monotonic()
        backend, _, transport = cell.partition("+")
        problem = _try(backend, transport, env)
        results[cell] = {"seconds": round(time.monotonic() - start, 1), "problem": problem}
    return results


def attempt(backend: str, transport: str) -> None:
    """Join a world of two on this cell and check what collectives return. Collective."""
    init(backend=backend, transport=transport)
    joined = backend_name(), transport_name(), size()
    if joined != (backend, transport, _PROCESSES):
        raise AssertionError(f"joined {joined} instead of {(backend, transport, _PROCESSES)}")
    total = allreduce(torch.ones(3) * (rank() + 1), op=Sum).tolist()
    ranks = allgather(torch.tensor([rank()])).tolist()
    if (total, ranks) != ([3.0] * 3, [0, 1]):
        raise AssertionError(f"allreduce gave {total} and allgather {ranks}")
    shutdown()


def _try(backend: str, transport: str, env: Mapping[str, str]) -> str | None:
    """Return what went wrong, None for nothing."""
    if transport == "nccl" and torch.cuda.device_count() < _PROCESSES:
        return f"not tried: NCCL needs a GPU for each of {_PROCESSES} processes"
    if transport == "mpi":
        return _try_mpirun(backend, transport, env)
    try:
        spawn(attempt, (backend, transport), _PROCESSES, timeout=_SECONDS)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def _try_mpirun(backend: str, transport: str, env: Mapping[str, str]) -> str | None:
    mpirun = shutil.which("mpirun")
    if mpirun is None:
        return "not tried: no mpirun on PATH"
    command = [mpirun, "-np", str(_PROCESSES)]
    named = subprocess.run([mpirun, "--version"], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if "Open MPI" in named.stdout:
        command += ["--oversubscribe", *["--allow-run-as-root"] * (os.getuid() == 0)]
    command += [sys.executable, "-m", __name__, backend, transport]
    try:
        ended = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            stdin=subprocess.DEVNULL,
            env=without_launchers(env),
        )
    except subprocess.TimeoutExpired:
        return f"did not end within {_SECONDS:.0f} s"
    if ended.returncode == 0:
        return None
    said = [line for line in (ended.stdout + ended.stderr).splitlines() if "Error" in line]
    return said[0] if said else f"exit code {ended.returncode}"


if __name__ == "__main__":
    attempt(*sys.argv[1:])
