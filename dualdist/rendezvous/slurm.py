"""Meeting where Slurm has started us on several hosts, and nothing else joins them.

A step's variables name its first host, where rank 0 runs (srun's block and cyclic distributions), but no port. So a few
ports follow from the job's numbers: rank 0 takes the first that is free on all its addresses, the others try them in
turn, and know rank 0 by the proof of the key-value server.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping

from ..errors import ConfigurationError
from ..launch.environment import secret_in
from .interfaces import LOOPBACK, candidates
from .keyvalue import KeyValueServer, KeyValueStore

__all__ = ("first_host", "meet", "tells_first_host")

_NODES = "SLURM_STEP_NODELIST"
_LOWEST_PORT, _PORTS, _TRIES = 20000, 10000, 8  # below what Linux hands out by itself
_KNOCK_SECONDS, _POLL_SECONDS, _ASK_SECONDS = 3.0, 0.1, 10.0


def tells_first_host(env: Mapping[str, str]) -> bool:
    """Return whether `meet` can be tried."""
    return bool(env.get("SLURM_STEP_ID") and env.get(_NODES))


def first_host(nodes: str) -> str:
    """Return the first of Slurm's list of hosts, such as node07 for node[07-12,20],gpu1."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    assert first is not None  # it matches nothing at least
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first[0])


@contextlib.contextmanager
def meet(rank: int, env: Mapping[str, str], timeout: float) -> Iterator[KeyValueStore]:
    """Give a key-value store that all processes of this step share. Collective. timeout: seconds to wait for rank 0.

    The secret is DUALDIST_SECRET; when it is not set, whoever knows the job's number can take part.
    """
    job = "/".join(env.get(name, "") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"))
    digest = hashlib.sha256(job.encode()).digest()
    secret = secret_in(env) or digest
    start = int.from_bytes(digest[:4], "big")
    ports = [_LOWEST_PORT + (start + 1237 * number) % _PORTS for number in range(_TRIES)]
    with contextlib.ExitStack() as stack:
        if rank == 0:
            port = _serve([LOOPBACK, *candidates(env)], ports, secret, stack)
            yield stack.enter_context(KeyValueStore(LOOPBACK, port, secret))
        else:
            host = LOOPBACK if env.get("SLURM_NODEID") == "0" else _address(first_host(env[_NODES]))
            yield stack.enter_context(_find(host, ports, secret, timeout))


def _address(node: str) -> str:
    """Return what stands for `node`: its name, or where Slurm itself finds it when the name is Slurm's alone."""
    with contextlib.suppress(OSError):
        return socket.gethostbyname(node)
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        told = subprocess.run(
            ["scontrol", "show", "node", node],
            capture_output=True,
            text=True,
            timeout=_ASK_SECONDS,
            check=True,
        )
        found = re.search(r"\bNodeAddr=(\S+)", told.stdout)
        if found:
            return found[1]
    return node


def _serve(hosts: list[str], ports: list[int], secret: bytes, stack: contextlib.ExitStack) -> int:
    """Serve at the first of `ports` that is free on all of `hosts`, and return it."""
    for port in ports:
        with contextlib.suppress(OSError):
            stack.enter_context(KeyValueServer(*hosts, secret=secret, port=port))
            return port
    raise ConfigurationError(
        f"One of the ports {', '.join(map(str, ports))} must be free on {', '.join(hosts)}, but none is. "
        "Set MASTER_ADDR and MASTER_PORT for every process."
    )


def _find(host: str, ports: list[int], secret: bytes, timeout: float) -> KeyValueStore:
    deadline = time.monotonic() + timeout
    problem = ""
    while time.monotonic() < deadline:
        for port in ports:
            try:
                return KeyValueStore(host, port, secret, timeout=_KNOCK_SECONDS)
            except ConfigurationError as error:
                problem = str(error)
        time.sleep(_POLL_SECONDS)
    raise ConfigurationError(
        f"Rank 0 must answer at {host} (the first of {_NODES}) within {timeout:.0f} s, but did not: {problem} "
        "Start MPI with srun --mpi=pmix, or set MASTER_ADDR and MASTER_PORT for every process."
    )
