"""The smoke test of `dualdist doctor`: two real processes join a world and exchange a few numbers.

If mpirun starts the processes, each of them runs

    python -m dualdist.cli.smoke BACKEND TRANSPORT
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .. import accelerator
from ..backends import TRANSPORTS
from ..collectives import allgather, allreduce
from ..launch.environment import without_launchers
from ..launch.mpirun import mpirun_command
from ..lifecycle import init, shutdown
from ..processes.spawn import spawn
from ..types import Sum
from ..world.ranks import backend_name, rank, size, transport_name

__all__ = ("attempt", "smoke")

_SECONDS = 60.0
_PROCESSES = 2


def smoke(combinations: Sequence[str], env: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Start each of `combinations` ('backend+transport') and return, for each, the seconds it took and its problem."""
    results = {}
    for combination in combinations:
        start = time.monotonic()
        backend, _, transport = combination.partition("+")
        problem = _try(backend, transport, env)
        results[combination] = {"seconds": round(time.monotonic() - start, 1), "problem": problem}
    return results


def attempt(backend: str, transport: str) -> None:
    """Join a world of two over `backend` and `transport`, and check the results of collectives. Collective."""
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
    """Return what went wrong, None when everything worked."""
    if TRANSPORTS[transport].needs_gpus and accelerator.count() < _PROCESSES:
        return f"not tried: {transport} needs a GPU for each of {_PROCESSES} processes"
    if TRANSPORTS[transport].needs_mpi:
        return _try_mpirun(backend, transport, env)
    try:
        spawn(attempt, (backend, transport), _PROCESSES, timeout=_SECONDS)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def _try_mpirun(backend: str, transport: str, env: Mapping[str, str]) -> str | None:
    command = mpirun_command(_PROCESSES, [sys.executable, "-m", __name__, backend, transport])
    if command is None:
        return "not tried: no mpirun on PATH"
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
    errors = [line for line in (ended.stdout + ended.stderr).splitlines() if "Error" in line]
    return errors[0] if errors else f"exit code {ended.returncode}"


if __name__ == "__main__":
    attempt(*sys.argv[1:])
