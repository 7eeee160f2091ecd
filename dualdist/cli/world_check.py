"""The processes of a launch meet, measure, and agree on the exit code."""

from __future__ import annotations

import contextlib
import json
import statistics
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

from ..backends import choose, load
from ..backends.store import SharedStore, open_store, store_gather
from ..errors import ConfigurationError
from ..launch import DeviceView, choose_devices, detect, shared_devices
from ..meeting import Gather, mpi, reporting_errors
from ..meeting.mpi import limited_start
from ..types import Launch
from ..world.settings import read_settings
from .world_facts import Link, ProcessFacts, clock_offsets, measure_links, versions

# What is wrong in a world, found by comparing what its processes have reported. Pure functions.

_CLOCK_SECONDS = 1.0
"""Clocks may differ by this much. torchrun drops a host whose clock is behind, because it compares the times of
heartbeats (torch/distributed/elastic/rendezvous/dynamic_rendezvous.py:_BackendRendezvousStateHolder._sanitize)."""
_SLOW = 3
"""A link is slow if it transfers this many times less than the others."""
_LATE, _SHORTEST_LATE, _LONGEST_GOOD = 5, 1e-3, 5e-3
"""A link is slow if its round trip is this many times longer than the others' and longer than a millisecond, or longer
than 5 ms (seconds). Hosts in one data centre need less than 1 ms."""
_OPEN_FILES, _FILES_PER_RANK = 1024, 4
"""How many files a process needs, and how many more for each rank: Gloo connects every rank to every other one."""
_SHARED_MEMORY = 128 << 20
"""Bytes of /dev/shm for each process: workers of a DataLoader, NCCL and shared-memory allreduces use them."""


@dataclass(frozen=True)
class Problem:
    """Something that is wrong."""

    kind: str
    hosts: tuple[str, ...]
    """The names of the hosts on which it is wrong."""
    ranks: tuple[int, ...]
    text: str
    """One or two sentences: what is wrong, and what to do."""


@dataclass(frozen=True)
class WorldFacts:
    """What all processes have reported."""

    processes: Sequence[ProcessFacts]
    """In rank order."""
    versions: Mapping[str, Mapping[str, str]]
    """Digest -> versions of packages, for each different digest."""
    links: Sequence[Link]

    @property
    def hosts(self) -> list[list[ProcessFacts]]:
        """The processes of each host, in the order of their first ranks."""
        hosts: dict[str, list[ProcessFacts]] = {}
        for process in self.processes:
            hosts.setdefault(process.node, []).append(process)
        return list(hosts.values())

    @property
    def clocks(self) -> list[float | None]:
        """By how many seconds each host's clock is ahead of most others'. With two hosts: of the first one's."""
        offsets = clock_offsets(self.links, len(self.hosts))
        known = [offset for offset in offsets if offset is not None]
        middle = statistics.median_low(known) if len(known) > 2 else 0.0
        return [None if offset is None else offset - middle for offset in offsets]


def find_problems(world: WorldFacts, least_bandwidth: float) -> list[Problem]:
    """Return what is wrong. least_bandwidth: of a link, in bytes per second."""
    return [
        *_backends(world),
        *_versions(world),
        *_clocks(world),
        *_links(world, least_bandwidth),
        *_gpus(world),
        *_limits(world),
    ]


def _backends(world: WorldFacts) -> Iterator[Problem]:
    broken: dict[str, list[ProcessFacts]] = {}
    for process in world.processes:
        if not process.usable:
            broken.setdefault(process.backend, []).append(process)
    for error, processes in broken.items():
        yield _problem("backend", processes, f"init() raises an error on {_where(processes)}: {error}")
    if not broken:
        usual, others = _split((process.backend, process) for process in world.processes)
        for backend, processes in others.items():
            yield _problem(
                "backend",
                processes,
                f"All ranks must choose the same backend, but {_where(processes)} chooses {backend} and the others "
                f"{usual}. Set DUALDIST_BACKEND for all processes, or install the same packages on all hosts.",
            )


def _versions(world: WorldFacts) -> Iterator[Problem]:
    names = sorted({name for found in world.versions.values() for name in found})
    for name in names:
        usual, others = _split(
            (world.versions[process.versions].get(name), process) for process in world.processes
        )
        for version, processes in others.items():
            yield _problem(
                "version",
                processes,
                f"{name} must be the same version everywhere, but is {version or 'absent'} on {_where(processes)} and "
                f"{usual or 'absent'} on the others. Install the same version, or look at PATH and PYTHONPATH there.",
            )


def _clocks(world: WorldFacts) -> Iterator[Problem]:
    for processes, offset in zip(world.hosts, world.clocks, strict=True):
        if offset is not None and abs(offset) > _CLOCK_SECONDS:
            side = "ahead of" if offset > 0 else "behind"
            others = "the others'" if len(world.hosts) > 2 else f"that of {world.hosts[0][0].host}"
            yield _problem(
                "clock",
                processes,
                f"The clock of {processes[0].host} is {abs(offset):.1f} s {side} {others}. Start NTP (chrony) there.",
            )


def _links(world: WorldFacts, least_bandwidth: float) -> Iterator[Problem]:
    rates = [link.bandwidth or 0.0 for link in world.links if not link.problem]
    trips = [link.round_trip for link in world.links if link.round_trip is not None]
    usual_rate = statistics.median_high(rates) if rates else 0.0
    usual_trip = statistics.median_low(trips) if trips else 0.0
    longest = min(_LONGEST_GOOD, max(_SHORTEST_LATE, _LATE * usual_trip))
    for link in world.links:
        ends = [world.hosts[link.source][0], world.hosts[link.target][0]]
        names = f"{ends[0].host} to {ends[1].host}"
        if link.problem:
            fix = "Open the firewall between them, or set DUALDIST_INTERFACE."
            yield _problem("link", ends, f"There is no connection from {names} at {link.problem}. {fix}")
            continue
        rate, trip = link.bandwidth or 0.0, link.round_trip or 0.0
        if rate < max(least_bandwidth, usual_rate / _SLOW):
            yield _problem(
                "link",
                ends,
                f"The link from {names} ({ends[0].interface} to {ends[1].interface}) is slow: {rate / 1e6:.1f} MB/s, "
                f"where {max(least_bandwidth, usual_rate) / 1e6:.1f} MB/s are usual or required. Check cable, switch "
                "port and MTU, or choose another network with DUALDIST_INTERFACE.",
            )
        if trip > longest:
            yield _problem(
                "link",
                ends,
                f"The link from {names} ({ends[0].interface} to {ends[1].interface}) is slow: a round trip takes "
                f"{trip * 1e3:.1f} ms, but should take less than {longest * 1e3:.1f} ms.",
            )


def _gpus(world: WorldFacts) -> Iterator[Problem]:
    for processes in world.hosts:
        blind = [process for process in processes if process.installed_gpus and not process.devices]
        if blind:
            yield _problem(
                "gpu",
                blind,
                f"torch sees no GPU on {_where(blind)}, although the driver lists {blind[0].installed_gpus}. Look at "
                "CUDA_VISIBLE_DEVICES, and whether this torch supports the driver.",
            )
    models = [(_models(processes), processes[0]) for processes in world.hosts]
    usual, others = _split(models)
    for found, processes in others.items():
        yield _problem(
            "gpu",
            processes,
            f"All hosts must have the same GPUs, but {_where(processes, with_ranks=False)} has {found or 'none'} and "
            f"the others {usual or 'none'}.",
        )
    views = [DeviceView(process.node, process.local_rank, process.devices) for process in world.processes]
    for node, ranks, devices in shared_devices(views, choose_devices(views)):
        processes = [process for process in world.processes if process.node == node]
        text = (
            f"{ranks} processes share {devices} GPUs on {processes[0].host}. Start one process for each GPU."
        )
        yield _problem("gpu", processes, text)


def _models(processes: Sequence[ProcessFacts]) -> str:
    """Return the models of all GPUs that the processes of a host see, such as '2 x H100'."""
    gpus = {pair for process in processes for pair in zip(process.devices, process.models, strict=True)}
    counts = Counter(model for _, model in gpus)
    return ", ".join(f"{count} x {model}" for model, count in sorted(counts.items()))


def _limits(world: WorldFacts) -> Iterator[Problem]:
    needed = _OPEN_FILES + _FILES_PER_RANK * max(0, len(world.processes) - _OPEN_FILES // _FILES_PER_RANK)
    few: dict[int, list[ProcessFacts]] = {}
    for process in world.processes:
        if 0 <= process.open_files < needed:
            few.setdefault(process.open_files, []).append(process)
    for limit, processes in few.items():
        yield _problem(
            "open files",
            processes,
            f"A process must be allowed to open {needed} files, but on {_where(processes)} only {limit}. "
            "Raise the limit there (ulimit -n, LimitNOFILE).",
        )
    for processes in world.hosts:
        free, least = processes[0].shared_memory, _SHARED_MEMORY * len(processes)
        if free < least:
            yield _problem(
                "shared memory",
                processes,
                f"/dev/shm of {processes[0].host} must have {least >> 20} MB free for its {len(processes)} processes, "
                f"but has {free >> 20} MB. Enlarge it (docker run --shm-size), or remove old files.",
            )


def _split(
    pairs: Iterable[tuple[str | None, ProcessFacts]],
) -> tuple[str | None, dict[str | None, list[ProcessFacts]]]:
    """Return the value that most hosts have, and the processes with each other value. Equal numbers: rank 0's value."""
    processes: dict[str | None, list[ProcessFacts]] = {}
    for value, process in pairs:
        processes.setdefault(value, []).append(process)
    # max returns the first of equals.
    usual = max(processes, key=lambda value: len({process.node for process in processes[value]}))
    return usual, {value: found for value, found in processes.items() if value != usual}


def _where(processes: Sequence[ProcessFacts], with_ranks: bool = True) -> str:
    """Return such as 'beta (ranks 2, 3)', or the first of many hosts and their number."""
    hosts: dict[str, list[int]] = {}
    for process in processes:
        hosts.setdefault(process.host, []).append(process.rank)
    shown = [
        f"{host} (rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))})" if with_ranks else host
        for host, ranks in list(hosts.items())[:8]
    ]
    return ", ".join(shown) + (f" and {len(hosts) - 8} other hosts" if len(hosts) > 8 else "")


def _problem(kind: str, processes: Sequence[ProcessFacts], text: str) -> Problem:
    hosts = tuple(dict.fromkeys(process.host for process in processes))
    return Problem(kind, hosts, tuple(sorted({process.rank for process in processes})), text)


# The report of `dualdist doctor --world`, as text and in the types of JSON.

_MOST_LINKS = 16
"""How many links the text lists. Of more links it shows the slowest."""


def as_json(launcher: str, world: WorldFacts, problems: Sequence[Problem]) -> dict[str, Any]:
    """Return the report. The clocks are in seconds, round trips too, bandwidths in bytes per second."""
    hosts = [
        {
            "host": processes[0].host,
            "ranks": [process.rank for process in processes],
            "clock": clock,
            **{
                name: getattr(processes[0], name)
                for name in (
                    "address",
                    "interface",
                    "cpus",
                    "threads",
                    "memory",
                    "shared_memory",
                    "open_files",
                )
            },
            "gpus": sorted({*zip(processes[0].devices, processes[0].models, strict=True)}),
        }
        for processes, clock in zip(world.hosts, world.clocks, strict=True)
    ]
    names = [processes[0].host for processes in world.hosts]
    links = [
        asdict(link) | {"source": names[link.source], "target": names[link.target]} for link in world.links
    ]
    return {
        "launcher": launcher,
        "size": len(world.processes),
        "backend": world.processes[0].backend,
        "hosts": hosts,
        "links": links,
        "problems": [asdict(problem) for problem in problems],
        "can_train": not problems,
    }


def as_text(report: dict[str, Any]) -> str:
    """Return the report that `as_json` made, for people."""
    hosts, problems = report["hosts"], report["problems"]
    return "\n".join(
        [
            f"World of {_count(report['size'], 'process', 'es')} on {_count(len(hosts), 'host')}, started by "
            f"{report['launcher']}; backend: {report['backend']}",
            "",
            *_table(_host_rows(hosts)),
            "",
            *([*_table(_link_rows(report["links"])), ""] if report["links"] else []),
            *(f"WRONG: {problem['text']}" for problem in problems),
            f"{_count(len(problems), 'problem')} must be solved first."
            if problems
            else "This allocation can train.",
        ]
    )


def _host_rows(hosts: Sequence[dict[str, Any]]) -> Iterator[list[str]]:
    yield ["host", "ranks", "address", "clock", "CPUs", "threads", "memory", "/dev/shm", "files", "GPUs"]
    for host in hosts:
        first, last = host["ranks"][0], host["ranks"][-1]
        in_order = host["ranks"] == list(range(first, last + 1))
        ranks = f"{first}-{last}" if in_order and first != last else ",".join(map(str, host["ranks"]))
        clock = "?" if host["clock"] is None else f"{host['clock']:+.3f} s"
        yield [
            host["host"],
            ranks,
            f"{host['address']} ({host['interface'] or '?'})",
            clock,
            str(host["cpus"]),
            str(host["threads"]),
            f"{host['memory'] / (1 << 30):.1f} GB",
            f"{host['shared_memory'] / (1 << 30):.1f} GB",
            str(host["open_files"]),
            ", ".join(model for _, model in host["gpus"]) or "none",
        ]


def _link_rows(links: Sequence[dict[str, Any]]) -> Iterator[list[str]]:
    yield ["link", "round trip", "bandwidth"]
    for link in sorted(links, key=lambda link: link["bandwidth"] or 0.0)[:_MOST_LINKS]:
        known = link["round_trip"] is not None
        yield [
            f"{link['source']} to {link['target']}",
            f"{link['round_trip'] * 1e3:.2f} ms" if known else "none",
            f"{(link['bandwidth'] or 0.0) / 1e6:.1f} MB/s" if known else "none",
        ]
    if len(links) > _MOST_LINKS:
        yield [f"({len(links) - _MOST_LINKS} faster links)", "", ""]


def _table(rows: Iterator[list[str]]) -> Iterator[str]:
    table = list(rows)
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        yield f"  {'  '.join(cells)}".rstrip()


def _count(number: int, noun: str, plural: str = "s") -> str:
    return f"{number} {noun}{plural * (number != 1)}"


_FAREWELL_SECONDS = 5.0
"""How long rank 0, which may serve the store, waits at most for the others to read the result."""


def check_world(
    env: Mapping[str, str], backend: str | None, transport: str | None, least_bandwidth: float, is_json: bool
) -> int:
    """Check the world that the launcher started, and return the exit code, the same on every rank. Collective.

    Rank 0 prints the report. backend, transport: as in dualdist.init. least_bandwidth: of a link, in bytes per second.
    Raises ConfigurationError if what the launcher set for this process is wrong.
    """
    timeout = read_settings(env).start_timeout_seconds
    launch = detect(env, mpi.world_size)
    printed: list[str] = []

    def print_own(error: str, is_own: bool) -> None:
        if is_own:
            _print_failure(launch, error, is_json)
        printed.append(error)

    try:
        # When a process ends, the launcher may end the one that has not printed yet.
        with reporting_errors(print_own), limited_start(env, timeout):
            shared = open_store(launch, env, timeout)
    except ConfigurationError as error:
        if str(error) not in printed:
            _print_failure(launch, str(error), is_json)
        return 1
    gather = store_gather(shared.store, launch.rank, launch.size, timeout)
    world = _collect(launch, env, backend, transport, shared.addresses.own, gather)
    code = 0
    if launch.rank == 0:
        report = as_json(launch.launcher, world, find_problems(world, least_bandwidth))
        sys.stdout.write(f"{json.dumps(report, indent=2) if is_json else as_text(report)}\n")
        sys.stdout.flush()
        code = int(not report["can_train"])
    code = int(gather(str(code))[0])
    _leave(shared, launch)
    return code


def _collect(
    launch: Launch,
    env: Mapping[str, str],
    backend: str | None,
    transport: str | None,
    address: str,
    gather: Gather,
) -> WorldFacts:
    """Return what all processes report, the same on every rank. Collective."""
    found = versions()
    chosen, usable = _chosen(launch, env, backend, transport)
    mine = ProcessFacts.of_this_process(launch, address, chosen, usable, found)
    processes = [ProcessFacts.from_json(text) for text in gather(mine.to_json())]
    digests = [process.versions for process in processes]
    # One rank for each different digest sends the versions.
    texts = gather(json.dumps(found) if digests.index(mine.versions) == launch.rank else "null")
    known = {digests[rank]: json.loads(text) for rank, text in enumerate(texts) if text != "null"}
    nodes = list(dict.fromkeys(process.node for process in processes))
    measures = [process.node for process in processes].index(mine.node) == launch.rank
    place = nodes.index(mine.node) if measures else None
    return WorldFacts(processes, known, measure_links(place, len(nodes), address, gather))


def _chosen(
    launch: Launch, env: Mapping[str, str], backend: str | None, transport: str | None
) -> tuple[str, bool]:
    """Return the backend that init() would choose and True, or its error and False."""
    transport = transport or env.get("DUALDIST_TRANSPORT") or None
    try:
        chosen, _ = choose(backend, transport, launch, env)
        if transport is not None:
            load(chosen.name).check(transport, launch)
    except ConfigurationError as error:
        return str(error), False
    return "+".join(filter(None, (chosen.name, transport))), True


def _print_failure(launch: Launch, error: str, is_json: bool) -> None:
    problem = {"kind": "arrival", "hosts": [], "ranks": [], "text": error}
    facts: dict[str, Any] = {"launcher": launch.launcher, "size": launch.size}
    report = facts | {"problems": [problem], "can_train": False}
    sys.stdout.write(f"{json.dumps(report, indent=2) if is_json else f'WRONG: {error}'}\n")
    sys.stdout.flush()


def _leave(shared: SharedStore, launch: Launch) -> None:
    """Wait on rank 0 until all others have read the exit code. Collective."""
    shared.store.set(f"left.{launch.rank}", "")
    if launch.rank == 0:
        with contextlib.suppress(RuntimeError):
            names = [f"left.{rank}" for rank in range(launch.size)]
            shared.store.wait(names, timedelta(seconds=_FAREWELL_SECONDS))
