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
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from .. import __version__
from ..core.backends import BACKENDS, DISTRIBUTED_BACKENDS, TRANSPORTS, choose, load, needs_gpus
from ..core.launch import detect
from ..core.launch.launchers import LAUNCHERS
from ..core.meeting.links import INTERFACE, LOOPBACK, addresses, candidates
from ..core.types import Launch
from ..errors import ConfigurationError
from ..processes.hosts import mpirun_command
from ..processes.job import without_launchers

_PACKAGES = ("torch", "torchvision", "numpy", "horovod", "mpi4py")
_COMMANDS = (*(row.name for row in LAUNCHERS if row.is_command), "ssh")
_INTERFACES = (INTERFACE, "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "HOROVOD_GLOO_IFACE")
_MPI_SECONDS = 30.0
_MPI_SOURCE = """\
from mpi4py import MPI
levels = {MPI.THREAD_SINGLE: "single", MPI.THREAD_FUNNELED: "funneled", MPI.THREAD_SERIALIZED: "serialized",
          MPI.THREAD_MULTIPLE: "multiple"}
print(MPI.Get_library_version().split(",")[0].splitlines()[0].strip("\\0 "), levels[MPI.Query_thread()], sep="\\n")
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `dualdist doctor`."""
    add = parser.add_argument
    add("--backend", choices=BACKENDS, help="the backend to check; by default the one that init() chooses")
    add("--transport", choices=TRANSPORTS, help="the transport to check")
    checks = parser.add_mutually_exclusive_group()
    text = "start two processes on every available backend and transport"
    checks.add_argument("--smoke", action="store_true", help=text)
    text = "under a launcher: all processes meet, and rank 0 reports what is wrong on which host"
    checks.add_argument("--world", action="store_true", help=text)
    text = "with --world: report links between hosts that are slower (10)"
    add("--least-bandwidth", type=float, default=10.0, metavar="MB/S", help=text)
    add("--json", action="store_true", help="print one JSON object")


def execute(args: argparse.Namespace) -> int:
    """Print what was detected; return the exit code. With --world: collective over the launched processes."""
    if args.world:
        from .world_check import check_world  # imports torch

        return check_world(os.environ, args.backend, args.transport, args.least_bandwidth * 1e6, args.json)
    report: dict[str, Any] = {"launch": {}}
    for section in _sections(os.environ, args.backend, args.transport, args.smoke):
        report[section.name] = section.facts
        if not args.json:
            lines = [section.title, *(f"  {name:16} {text}" for name, text in section.rows.items()), ""]
            print("\n".join(lines), flush=True)
    if args.json:
        print(json.dumps(report, indent=2))
    problems = [report["chosen"]["problem"], report["network"]["problem"]]
    problems += [result["problem"] for result in report.get("smoke", {}).values() if not result["skipped"]]
    return int(any(problem is not None for problem in problems))


class Section(NamedTuple):
    """A part of the report: the key of its facts in the JSON, in whose types they are, and what the text shows."""

    name: str
    facts: Mapping[str, Any]
    title: str
    rows: Mapping[str, str]


def _sections(env: Mapping[str, str], backend: str | None, transport: str | None, smoke: bool) -> Iterator[Section]:
    """Yield each section as soon as its facts are known: torch is imported after the first one."""
    transport = transport or env.get("DUALDIST_TRANSPORT") or None
    chosen: dict[str, str | None] = {"backend": None, "transport": transport, "why": None, "problem": None}
    cells: dict[str, str | None] = {}
    try:
        launch = detect(env)
        yield _launch(launch)
        cells = {
            f"{backend}+{name}": problem
            for backend in DISTRIBUTED_BACKENDS
            for name, known in TRANSPORTS.items()
            if (problem := _problem(backend, name, launch)) is None or known.comes_with_torch
        }
        choice = choose(backend, transport, launch, env)
        chosen |= {"backend": choice.backend.name, "why": choice.reason}
        if transport is not None:
            chosen["problem"] = _problem(choice.backend.name, transport, launch)
    except ConfigurationError as error:
        chosen["problem"] = str(error)
    name = "+".join(filter(None, (chosen["backend"], transport))) or "nothing"
    yield Section("chosen", chosen, "Chosen", {name: chosen["problem"] or chosen["why"] or ""})
    yield _versions()
    if cells:
        rows = {name: problem or "yes" for name, problem in cells.items()}
        yield Section("cells", cells, "Can start here", rows)
    yield _network(env)
    yield _gpu()
    yield _mpi(env)
    launchers = {name: path for name in _COMMANDS if (path := shutil.which(name))}
    yield Section("launchers", launchers, "Launchers", launchers)
    if smoke:  # last, because it takes seconds
        yield _smoke([name for name, problem in cells.items() if problem is None], env)


def _problem(backend: str, transport: str, launch: Launch) -> str | None:
    """Return why the processes of `launch` cannot use this backend and transport, None if they can."""
    try:
        load(backend).check(transport, launch)
        return None
    except ConfigurationError as error:
        return str(error)


def _launch(launch: Launch) -> Section:
    numbers = {name: getattr(launch, name) for name in ("rank", "size", "local_rank", "local_size")}
    sources = {name: source for name, source in launch.sources.items() if numbers[name] is not None}
    facts = {"launcher": launch.launcher, **numbers, "sources": sources, "meets_at": launch.init_method}
    facts |= {"starts_mpi": launch.starts_mpi, "ignored": list(launch.ignored)}
    rows = {"launcher": launch.launcher} | {name: launch.describe(name) for name in sources}
    rows |= {"meets at": launch.init_method} if launch.init_method else {}
    if launch.ignored:
        rows["ignored"] = f"{', '.join(launch.ignored)}: no launcher started this process"
    return Section("launch", facts, "Launch", rows)


def _versions() -> Section:
    found: dict[str, str | None] = {"dualdist": __version__, "python": platform.python_version()}
    for name in _PACKAGES:
        found[name] = None
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    rows = {name: text or "not installed" for name, text in found.items()}
    return Section("versions", found, "Versions", rows)


def _network(env: Mapping[str, str]) -> Section:
    try:
        use, problem = candidates(env), None
    except ConfigurationError as error:
        use, problem = [], str(error)
    low, high = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    with socket.create_server((LOOPBACK, 0)) as server:
        free = server.getsockname()[1]
    host, on_one_host = socket.gethostname(), use[0] if use and env.get(INTERFACE) else LOOPBACK
    ports = f"free ones of {low}-{high}, such as {free}"
    is_set = {name: env[name] for name in _INTERFACES if env.get(name)}
    facts = {"host": host, "interfaces": addresses(), "on_one_host": on_one_host, "between_hosts": use}
    between = problem or ", ".join(use) or "no address"
    rows = {**addresses(), "on one host": on_one_host, "between hosts": between, "ports": ports, **is_set}
    return Section("network", facts | {"problem": problem, "ports": ports, "set": is_set}, f"Network of {host}", rows)


def _gpu() -> Section:
    import torch

    usable = torch.cuda.is_available()
    count = torch.cuda.device_count() if usable else 0
    devices = [torch.cuda.get_device_name(number) for number in range(count)]
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if usable else None
    facts = {"cuda": torch.version.cuda, "devices": devices, "nccl": nccl}
    rows = {"devices": ", ".join(devices) or "none", "NCCL": nccl or "not usable"}
    return Section("gpu", facts, "GPU", rows)


def _mpi(env: Mapping[str, str]) -> Section:
    """Start MPI in a new process: under most launchers, starting it in this process would fail."""
    output, problem = _run([sys.executable, "-c", _MPI_SOURCE], env, _MPI_SECONDS, "MPI did not start")
    library, level = output.splitlines() if problem is None else (None, None)
    text = problem or f"{library}, threads: {level}"
    return Section("mpi", {"library": library, "thread_level": level, "problem": problem}, "MPI", {"library": text})


def _run(
    command: list[str], env: Mapping[str, str], seconds: float, late: str = "did not end"
) -> tuple[str, str | None]:
    """Run `command` without the variables of launchers in `env`. Return its output, and what went wrong.

    late: what went wrong if it takes longer than `seconds`.
    """
    clean, none = without_launchers(env), subprocess.DEVNULL
    try:
        ended = subprocess.run(command, env=clean, stdin=none, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return "", f"{late} within {seconds:.0f} s"
    if ended.returncode == 0:
        return ended.stdout, None
    text = f"exit code {ended.returncode}\n{ended.stdout}{ended.stderr}"
    # Messages alone: a traceback also quotes lines of source that name errors.
    messages = re.findall(r"\b\w*Error: .+", text) or text.rstrip().splitlines()
    return ended.stdout, messages[-1]


# The smoke test: two real processes, python -m dualdist.doctor.command BACKEND TRANSPORT, join a world.

_SECONDS = 60.0
_PROCESSES = 2


def _smoke(combinations: list[str], env: Mapping[str, str]) -> Section:
    from ..core import accelerator

    results: dict[str, dict[str, Any]] = {}
    for combination in combinations:
        start = time.monotonic()
        backend, transport = combination.split("+")
        words = [sys.executable, "-m", __name__, backend, transport]
        run = [sys.executable, "-m", "dualdist", "run", "-np", str(_PROCESSES), *words]
        command = mpirun_command(_PROCESSES, words) if TRANSPORTS[transport].needs_mpi else run
        if needs_gpus(transport) and accelerator.count() < _PROCESSES:
            problem: str | None = f"not tried: {transport} needs a GPU for each of {_PROCESSES} processes"
        else:
            problem = _run(command, env, _SECONDS)[1] if command else "not tried: no mpirun on PATH"
        seconds, skipped = round(time.monotonic() - start, 1), str(problem).startswith("not tried")
        results[combination] = {"seconds": seconds, "problem": problem, "skipped": skipped}
    rows = {name: result["problem"] or f"works ({result['seconds']} s)" for name, result in results.items()}
    return Section("smoke", results, "Two processes", rows)


def attempt(backend: str, transport: str) -> None:
    """Join a world of two over `backend` and `transport`, and check the results of collectives. Collective."""
    import torch

    import dualdist as hvd

    hvd.init(backend=backend, transport=transport)
    joined = hvd.backend_name(), hvd.transport_name(), hvd.size()
    if joined != (backend, transport, _PROCESSES):
        raise AssertionError(f"joined {joined} instead of {(backend, transport, _PROCESSES)}")
    total = hvd.allreduce(torch.ones(3, device="cpu") * (hvd.rank() + 1), op=hvd.Sum).tolist()
    ranks = hvd.allgather(torch.tensor([hvd.rank()], device="cpu")).tolist()
    if (total, ranks) != ([3.0] * 3, [0, 1]):
        raise AssertionError(f"allreduce gave {total} and allgather {ranks}")
    hvd.shutdown()


if __name__ == "__main__":
    attempt(*sys.argv[1:])
