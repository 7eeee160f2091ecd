"""Where the ranks of a Slurm step on several hosts meet: Slurm itself carries no message between them.

A step's variables name its first host, where rank 0 runs (srun's block and cyclic distributions), but no port. So a few
ports are computed from the IDs of job and step. Rank 0 serves at the first one that is free on all its addresses. The
others try all of them; they recognise rank 0 because its server proves that it knows the secret.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import socket
import subprocess
from collections.abc import Mapping

from ..launch.environment import secret_in
from .addresses import LOOPBACK, candidates
from .boards import Board, Known, Place

_NODES = "SLURM_STEP_NODELIST"
_LOWEST_PORT, _PORTS, _TRIES = 20000, 10000, 8
"""The lowest port, the number of ports, and how many to try. All are below the ports that Linux itself assigns."""
_SCONTROL_SECONDS = 10.0


def has_first_host(env: Mapping[str, str]) -> bool:
    """Return whether `env` names the step's first host, which `connect` needs."""
    return bool(env.get("SLURM_STEP_ID") and env.get(_NODES))


def first_host(nodes: str) -> str:
    """Return the first host of Slurm's list, such as node07 for node[07-12,20],gpu1."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    assert first is not None  # it matches the empty string
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first[0])


def slurm_board(rank: int, env: Mapping[str, str]) -> Board:
    """Return the first host of the step. Without DUALDIST_SECRET, all who know the job's IDs know its secret."""
    job = "/".join(env.get(name, "") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"))
    digest = hashlib.sha256(job.encode()).digest()
    start = int.from_bytes(digest[:4], "big")
    ports = [_LOWEST_PORT + (start + 1237 * number) % _PORTS for number in range(_TRIES)]
    first = first_host(env[_NODES])
    is_there = rank == 0 or env.get("SLURM_NODEID") == "0"
    return Known(
        Place([LOOPBACK if is_there else node_address(first)], ports, secret_in(env) or digest),
        f"{first}, the first host of {_NODES}",
        "Start MPI with srun --mpi=pmix, or set MASTER_ADDR and MASTER_PORT for every process.",
        [LOOPBACK, *candidates(env)] if rank == 0 else [],
    )


def node_address(node: str) -> str:
    """Return an address of `node`. Ask Slurm if only Slurm knows the name."""
    with contextlib.suppress(OSError):
        return socket.gethostbyname(node)
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        answer = subprocess.run(
            ["scontrol", "show", "node", node],
            capture_output=True,
            text=True,
            timeout=_SCONTROL_SECONDS,
            check=True,
        )
        found = re.search(r"\bNodeAddr=(\S+)", answer.stdout)
        if found:
            return found[1]
    return node
