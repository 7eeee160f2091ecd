"""Slurm's hosts: short forms of lists of them, which Flux and Linux use, too, and where the ranks of a step meet."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import re
import socket
import subprocess
from collections.abc import Iterator, Mapping

from .core.launch import secret_in
from .core.meeting import Board, KnownBoard, ServerAddress
from .core.meeting.links import LOOPBACK, candidates

_PART = re.compile(r"\[([^\]]*)\]|([^\[]+)")


def host_names(text: str) -> list[str]:
    """Return the names in a list such as node[07-08,20],gpu1, which is node07, node08, node20, gpu1."""
    names: list[str] = []
    for entry in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", text):
        parts = [list(numbers_in(ranges)) if ranges else [part] for ranges, part in _PART.findall(entry)]
        names += map("".join, itertools.product(*parts))
    return names


def numbers_in(ranges: str) -> Iterator[str]:
    """Yield the numbers in a list such as 07-08,20, with their leading zeros."""
    for item in filter(None, ranges.split(",")):
        first, _, last = item.partition("-")
        for number in range(int(first), int(last or first) + 1):
            yield f"{number:0{len(first)}d}"


def entry_of_node(text: str, node: str) -> str:
    """Return node number `node`'s entry in Slurm's list of sizes, such as 4(x2),3.

    '' when the list does not give it: then the backend counts after init.
    """
    sizes = node_counts(text)
    if sizes is None:
        return text
    if len(set(sizes)) == 1:
        return str(sizes[0])
    return str(sizes[int(node)]) if node.isdecimal() and int(node) < len(sizes) else ""


def node_counts(text: str) -> list[int] | None:
    """Return a number for each node from a list such as 4(x2),3, which is 4, 4, 3. None for any other form."""
    counts: list[int] = []
    for entry in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", entry)
        if match is None:
            return None
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


# Where the ranks of a Slurm step on several hosts meet: Slurm itself carries no message between them.
#
# A step's variables name its first host, where rank 0 runs (srun's block and cyclic distributions), but no port. So a
# few ports are computed from the IDs of job and step. Rank 0 serves at the first one that is free on all its addresses.
# The others try all of them; they recognise rank 0 because its server proves that it knows the secret.

_NODES = "SLURM_STEP_NODELIST"
LOWEST_PORT, PORTS, _TRIES = 20000, 10000, 8
"""The lowest port, the number of ports, and how many to try. All are below the ports that Linux itself assigns."""
_SCONTROL_SECONDS = 10.0


def slurm_board(rank: int, env: Mapping[str, str]) -> Board | None:
    """Return the board of a step's first host, None outside a step. Without DUALDIST_SECRET, its IDs are the secret."""
    if not (env.get("SLURM_STEP_ID") and env.get(_NODES)):
        return None
    job = "/".join(env.get(name, "") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"))
    digest = hashlib.sha256(job.encode()).digest()
    start = int.from_bytes(digest[:4], "big")
    ports = [LOWEST_PORT + (start + 1237 * number) % PORTS for number in range(_TRIES)]
    first = host_names(env[_NODES])[0]
    is_there = rank == 0 or env.get("SLURM_NODEID") == "0"
    return KnownBoard(
        ServerAddress([LOOPBACK if is_there else node_address(first)], ports, secret_in(env) or digest),
        f"{first}, the first host of {_NODES}",
        "Start MPI with srun --mpi=pmix, or set MASTER_ADDR and MASTER_PORT for every process.",
        [LOOPBACK, *candidates(env)] if rank == 0 else [],
    )


def node_address(node: str) -> str:
    """Return an address of `node`. Ask Slurm if only Slurm knows the name."""
    with contextlib.suppress(OSError, UnicodeError):
        return socket.gethostbyname(node)
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        command = ["scontrol", "show", "node", node]
        answer = subprocess.run(command, capture_output=True, text=True, timeout=_SCONTROL_SECONDS, check=True)
        found = re.search(r"\bNodeAddr=(\S+)", answer.stdout)
        if found:
            return found[1]
    return node
