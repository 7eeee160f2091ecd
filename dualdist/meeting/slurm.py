"""A key-value server on rank 0, for Slurm steps on several hosts: Slurm itself provides none.

A step's variables name its first host, where rank 0 runs (srun's block and cyclic distributions), but no port. So a few
ports are computed from the IDs of job and step. Rank 0 serves at the first one that is free on all its addresses. The
others try them in turn; they recognise rank 0 because its key-value server proves that it knows the secret.
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
from .addresses import LOOPBACK, candidates
from .keyvalue import KeyValueClient, KeyValueServer

_NODES = "SLURM_STEP_NODELIST"
_LOWEST_PORT, _PORTS, _TRIES = 20000, 10000, 8
"""The lowest port, the number of ports, and how many to try. All are below the ports that Linux itself assigns."""
_CONNECT_SECONDS, _POLL_SECONDS, _SCONTROL_SECONDS = 3.0, 0.1, 10.0


def has_first_host(env: Mapping[str, str]) -> bool:
    """Return whether `env` names the step's first host, which `connect` needs."""
    return bool(env.get("SLURM_STEP_ID") and env.get(_NODES))


def first_host(nodes: str) -> str:
    """Return the first host of Slurm's list, such as node07 for node[07-12,20],gpu1."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    assert first is not None  # it matches the empty string
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first[0])


@contextlib.contextmanager
def connect(rank: int, env: Mapping[str, str], timeout: float) -> Iterator[KeyValueClient]:
    """Yield a client of a key-value server on rank 0. Collective over the step. timeout: seconds to wait for rank 0.

    The secret is DUALDIST_SECRET. If it is not set, any process that knows the IDs of job and step can connect.
    Raises ConfigurationError when no port is free or rank 0 does not answer.
    """
    job = "/".join(env.get(name, "") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"))
    digest = hashlib.sha256(job.encode()).digest()
    secret = secret_in(env) or digest
    start = int.from_bytes(digest[:4], "big")
    ports = [_LOWEST_PORT + (start + 1237 * number) % _PORTS for number in range(_TRIES)]
    with contextlib.ExitStack() as stack:
        if rank == 0:
            port = _serve([LOOPBACK, *candidates(env)], ports, secret, stack)
            yield stack.enter_context(KeyValueClient(LOOPBACK, port, secret))
        else:
            host = LOOPBACK if env.get("SLURM_NODEID") == "0" else node_address(first_host(env[_NODES]))
            yield stack.enter_context(_find_server(host, ports, secret, timeout))


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


def _serve(hosts: list[str], ports: list[int], secret: bytes, stack: contextlib.ExitStack) -> int:
    """Serve at the first of `ports` that is free on all addresses `hosts`. Return the port."""
    for port in ports:
        with contextlib.suppress(OSError):
            stack.enter_context(KeyValueServer(*hosts, secret=secret, port=port))
            return port
    raise ConfigurationError(
        f"One of the ports {', '.join(map(str, ports))} must be free on {', '.join(hosts)}, but none is. "
        "Set MASTER_ADDR and MASTER_PORT for every process."
    )


def _find_server(host: str, ports: list[int], secret: bytes, timeout: float) -> KeyValueClient:
    """Try `ports` until one answers with the proof of `secret`."""
    deadline = time.monotonic() + timeout
    problem = ""
    while time.monotonic() < deadline:
        for port in ports:
            try:
                return KeyValueClient(host, port, secret, timeout=_CONNECT_SECONDS)
            except ConfigurationError as error:
                problem = str(error)
        time.sleep(_POLL_SECONDS)
    raise ConfigurationError(
        f"Rank 0 must answer at {host} (the first of {_NODES}) within {timeout:.0f} s, but did not: {problem} "
        "Start MPI with srun --mpi=pmix, or set MASTER_ADDR and MASTER_PORT for every process."
    )
