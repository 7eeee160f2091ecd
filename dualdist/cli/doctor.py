"""Show what dualdist detects here: the launcher, the installed packages, and which backends can run.

    dualdist doctor                    what a script would detect if it were started in the same way
    torchrun ... -m dualdist doctor    the same under a launcher
    dualdist doctor --smoke            also start two processes on every available backend and transport
    mpirun ... dualdist doctor --world    check all processes and hosts, and the links between them

The exit code is 1 when the chosen backend and transport cannot start, when an available combination fails under
--smoke, or when --world finds a problem.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from .. import accelerator
from ..backends import BACKENDS, DISTRIBUTED_BACKENDS, TRANSPORTS, choose, load
from ..collectives import allgather, allreduce
from ..errors import ConfigurationError
from ..launch import LAUNCHERS, detect
from ..launch.environment import without_launchers
from ..launch.launchers import mpirun_command
from ..lifecycle import init, shutdown
from ..meeting import INTERFACE, LOOPBACK
from ..meeting.addresses import addresses, candidates
from ..processes.function import spawn
from ..types import Launch, Sum
from ..world.ranks import backend_name, rank, size, transport_name
from . import version
from .world_check import check_world

# The smoke test of `dualdist doctor`: two real processes join a world and exchange a few numbers.
#
# If mpirun starts the processes, each of them runs
#
#     python -m dualdist.cli.doctor BACKEND TRANSPORT

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


# What `dualdist doctor` collects: the launcher, the installed packages, and what can run here.

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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `dualdist doctor`."""
    parser.add_argument(
        "--backend", choices=BACKENDS, help="the backend to check; by default the one that init() chooses"
    )
    parser.add_argument("--transport", choices=TRANSPORTS, help="the transport to check")
    checks = parser.add_mutually_exclusive_group()
    checks.add_argument(
        "--smoke", action="store_true", help="start two processes on every available backend and transport"
    )
    checks.add_argument(
        "--world",
        action="store_true",
        help="under a launcher: all processes meet, and rank 0 reports what is wrong on which host",
    )
    parser.add_argument(
        "--least-bandwidth",
        type=float,
        default=10.0,
        metavar="MB/S",
        help="with --world: report links between hosts that are slower (10)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def execute(args: argparse.Namespace) -> int:
    """Print what was detected; return the exit code. With --world: collective over the launched processes."""
    if args.world:
        bandwidth = args.least_bandwidth * 1e6
        return check_world(os.environ, args.backend, args.transport, bandwidth, args.json)
    facts = collect(os.environ, args.backend, args.transport)
    if args.smoke:
        available = [name for name, problem in facts.get("cells", {}).items() if problem is None]
        facts["smoke"] = smoke(available, os.environ)
    sys.stdout.write(f"{json.dumps(facts, indent=2) if args.json else _text(facts)}\n")
    failed = [result for result in facts.get("smoke", {}).values() if _has_failed(result["problem"])]
    return int(
        facts["chosen"]["problem"] is not None or facts["network"]["problem"] is not None or bool(failed)
    )


def _has_failed(problem: str | None) -> bool:
    return problem is not None and not problem.startswith("not tried")


def _text(facts: Mapping[str, Any]) -> str:
    return "\n".join(line for section in _sections(facts) for line in (*section, "")).rstrip()


def _sections(facts: Mapping[str, Any]) -> Iterator[list[str]]:
    launch, chosen, network, gpu, mpi = (
        facts[name] for name in ("launch", "chosen", "network", "gpu", "mpi")
    )
    if launch:
        yield ["Launch", *_launch_lines(launch)]
    name = "+".join(filter(None, (chosen["backend"], chosen["transport"]))) or "nothing"
    yield ["Chosen", _line(name, chosen["problem"] or chosen["why"])]
    yield ["Versions", *(_line(name, found or "not installed") for name, found in facts["versions"].items())]
    if "cells" in facts:
        yield ["Can start here", *(_line(name, problem or "yes") for name, problem in facts["cells"].items())]
    if "smoke" in facts:
        results = facts["smoke"].items()
        shown = {name: result["problem"] or f"works ({result['seconds']} s)" for name, result in results}
        yield ["Two processes", *(_line(name, text) for name, text in shown.items())]
    yield [
        "Network of " + network["host"],
        *(_line(name, address) for name, address in network["interfaces"].items()),
        _line("on one host", network["on_one_host"]),
        _line("between hosts", network["problem"] or ", ".join(network["between_hosts"]) or "no address"),
        _line("ports", network["ports"]),
        *(_line(name, value) for name, value in network["set"].items()),
    ]
    yield [
        "GPU",
        _line("devices", ", ".join(gpu["devices"]) or "none"),
        _line("NCCL", gpu["nccl"] or "not usable"),
    ]
    yield ["MPI", _line("library", mpi["problem"] or f"{mpi['library']}, threads: {mpi['thread_level']}")]
    yield ["Launchers", *(_line(name, path) for name, path in facts["launchers"].items())]


def _launch_lines(launch: Mapping[str, Any]) -> Iterator[str]:
    yield _line("launcher", launch["launcher"])
    for name, source in launch["sources"].items():
        yield _line(name, f"{launch[name]} (from {source})")
    if launch["meets_at"]:
        yield _line("meets at", launch["meets_at"])
    for variable in launch["ignored"]:
        yield _line("ignored", f"{variable}: no launcher started this process")


def _line(name: str, text: str) -> str:
    return f"  {name:16} {text}"
