"""What `dualdist doctor` collects: the launcher, the installed packages, and what can run here."""

from __future__ import annotations

import contextlib
import importlib.metadata
import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ..backends import DISTRIBUTED_BACKENDS, TRANSPORTS, choose, load
from ..errors import ConfigurationError
from ..launch import LAUNCHERS, detect
from ..launch.environment import without_launchers
from ..rendezvous import INTERFACE, LOOPBACK
from ..rendezvous.interfaces import addresses, candidates
from ..types import Launch
from .version import version

__all__ = ("collect",)

_PACKAGES = ("torch", "torchvision", "numpy", "horovod", "mpi4py")
_COMMANDS = (*(row.name for row in LAUNCHERS if row.is_command), "ssh")
_MPI_SECONDS = 30.0
_MPI_SOURCE = """\
from mpi4py import MPI
levels = {MPI.THREAD_SINGLE: "single", MPI.THREAD_FUNNELED: "funneled", MPI.THREAD_SERIALIZED: "serialized",
          MPI.THREAD_MULTIPLE: "multiple"}
print(MPI.Get_library_version().split(",")[0].strip("\\0\\n "), levels[MPI.Query_thread()], sep="\\n")
"""


def collect(env: Mapping[str, str], backend: str | None, transport: str | None) -> dict[str, Any]:
    """Return all facts in the types of JSON. Local. backend, transport: as in dualdist.init."""
    transport = transport or env.get("DUALDIST_TRANSPORT") or None
    facts: dict[str, Any] = {
        "launch": {},
        "chosen": {"backend": None, "transport": transport, "why": None, "problem": None},
    }
    try:
        launch = detect(env)
        facts["launch"] = _launch(launch)
        facts["cells"] = _combinations(launch)
        facts["chosen"] |= _chosen(launch, env, backend, transport)
    except ConfigurationError as error:
        facts["chosen"]["problem"] = str(error)
    return facts | {
        "versions": _versions(),
        "network": _network(env),
        "gpu": _gpu(),
        "mpi": _mpi(env),
        "launchers": {name: path for name in _COMMANDS if (path := shutil.which(name))},
    }


def _combinations(launch: Launch) -> dict[str, str | None]:
    """Return 'backend+transport' -> why the processes of `launch` cannot use it, None if they can."""
    return {
        f"{backend}+{transport}": _problem(backend, transport, launch)
        for backend in DISTRIBUTED_BACKENDS
        for transport in TRANSPORTS
    }


def _problem(backend: str, transport: str, launch: Launch) -> str | None:
    try:
        load(backend).check(transport, launch)
    except ConfigurationError as error:
        return str(error)
    return None


def _launch(launch: Launch) -> dict[str, Any]:
    numbers = ("rank", "size", "local_rank", "local_size")
    return {
        "launcher": launch.launcher,
        **{name: getattr(launch, name) for name in numbers},
        "sources": {
            name: source for name, source in launch.sources.items() if getattr(launch, name) is not None
        },
        "meets_at": launch.init_method,
        "starts_mpi": launch.starts_mpi,
        "ignored": list(launch.ignored),
    }


def _chosen(
    launch: Launch, env: Mapping[str, str], backend: str | None, transport: str | None
) -> dict[str, Any]:
    found, why = choose(backend, transport, launch, env)
    chosen: dict[str, Any] = {"backend": found.name, "why": why}
    if transport is not None:
        chosen["problem"] = _problem(found.name, transport, launch)
    return chosen


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {"dualdist": version(), "python": platform.python_version()}
    for name in _PACKAGES:
        found[name] = None
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def _network(env: Mapping[str, str]) -> dict[str, Any]:
    try:
        use, problem = candidates(env), None
    except ConfigurationError as error:
        use, problem = [], str(error)
    low, high = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    with socket.create_server((LOOPBACK, 0)) as server:
        free = server.getsockname()[1]
    return {
        "host": socket.gethostname(),
        "interfaces": addresses(),
        "on_one_host": use[0] if use and env.get(INTERFACE) else LOOPBACK,
        "between_hosts": use,
        "problem": problem,
        "ports": f"free ones of {low}-{high}, such as {free}",
        "set": {
            name: env[name]
            for name in (INTERFACE, "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "HOROVOD_GLOO_IFACE")
            if env.get(name)
        },
    }


def _gpu() -> dict[str, Any]:
    usable = torch.cuda.is_available()
    count = torch.cuda.device_count() if usable else 0
    return {
        "cuda": torch.version.cuda,
        "devices": [torch.cuda.get_device_name(number) for number in range(count)],
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if usable else None,
    }


def _mpi(env: Mapping[str, str]) -> dict[str, str | None]:
    """Start MPI in a new process: under most launchers, starting it in this process would fail."""
    facts: dict[str, str | None] = {"library": None, "thread_level": None, "problem": None}
    try:
        ended = subprocess.run(
            [sys.executable, "-c", _MPI_SOURCE],
            capture_output=True,
            text=True,
            timeout=_MPI_SECONDS,
            check=True,
            env=without_launchers(env),
            stdin=subprocess.DEVNULL,
        )
        facts["library"], facts["thread_level"] = ended.stdout.splitlines()
    except subprocess.CalledProcessError as error:
        facts["problem"] = (error.stderr.strip().splitlines() or [f"exit code {error.returncode}"])[-1]
    except subprocess.TimeoutExpired:
        facts["problem"] = f"MPI did not start within {_MPI_SECONDS:.0f} s"
    return facts
