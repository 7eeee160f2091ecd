"""`dualdist doctor --world`: the processes of a launch meet, report what they have, and rank 0 compares it.

world_links.py measures the links between the hosts.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import platform
import socket
import statistics
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..core import accelerator
from ..core.backends import choose
from ..core.backends.torch_groups import meet
from ..core.checks import shown_ranks
from ..core.launch import detect, read_settings
from ..core.meeting.links import Gather, find_addresses, interface_of, own_node
from ..core.types import Launch
from ..devices.choice import NO_NVLINK, DeviceView, choose_devices, confined_hosts, shared_devices, visible
from ..errors import ConfigurationError
from ..exec.command import cores_by_node, numa_node
from ..mpi import meeting as mpi
from .world_links import Link, measure_links


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
        with mpi.limited_start(env, timeout) as limit, contextlib.ExitStack() as stack:
            limit.announce(launch)
            meeting = stack.enter_context(meet(launch, env, timeout, print_own))
            address = find_addresses(launch.rank, meeting.gather, env).own
            world = _collect(launch, _chosen(launch, env, backend, transport), address, meeting.gather)
            code = 0
            if launch.rank == 0:
                report = as_json(launch.launcher, world, find_problems(world, least_bandwidth))
                _print(json.dumps(report, indent=2) if is_json else as_text(report))
                code = int(not report["can_train"])
            return int(meeting.gather(str(code))[0])
    except ConfigurationError as error:
        if str(error) not in printed:
            _print_failure(launch, str(error), is_json)
        return 1


def _print_failure(launch: Launch, error: str, is_json: bool) -> None:
    facts: dict[str, Any] = {"launcher": launch.launcher, "size": launch.size}
    problem = Problem("arrival", (), (), error)
    report = facts | {"problems": [problem._asdict()], "can_train": False}
    _print(json.dumps(report, indent=2) if is_json else f"WRONG: {error}")


def _print(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


# What the processes report.


@dataclass(frozen=True)
class ProcessFacts:
    """One process, in the types of JSON."""

    rank: int
    node: str
    """A name that no other host has (own_node)."""
    host: str
    local_rank: int | None
    address: str
    """The IPv4 address at which the others reach this process."""
    interface: str
    versions: str
    """The digest of the versions of its packages."""
    backend: str
    """The backend that init() would choose, or the error that it would raise."""
    usable: bool
    """Whether init() could choose a backend."""
    devices: Sequence[str]
    """A name of each device that torch sees; the processes of a host use the same name for a device."""
    models: Sequence[str]
    """The model of each device that torch sees."""
    installed_gpus: int
    """The GPUs of the host that NVIDIA's driver lists, if torch was built for CUDA."""
    device_nodes: Sequence[int]
    """The NUMA node of each device that torch sees, -1 where it is not known."""
    cores: Sequence[int]
    """The CPUs on which this process may run, in order."""
    core_nodes: Sequence[int]
    """The NUMA nodes of these CPUs."""
    installed_cores: int
    """The CPUs of the host."""
    device_numbers: Sequence[str] = ()
    """As in DeviceView."""


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
    def views(self) -> list[DeviceView]:
        """What the processes see, as init() compares it."""
        return [DeviceView(one.node, one.local_rank, one.devices, numbers=one.device_numbers) for one in self.processes]

    @property
    def clocks(self) -> list[float | None]:
        """By how many seconds each host's clock is ahead of most others'. With two hosts: of the first one's."""
        steps = {(link.source, link.target): link.clock for link in self.links}
        offsets: list[float | None] = [0.0]
        for place in range(1, len(self.hosts)):
            # The link over the largest step that ends here and does not start behind host 0.
            before = place - (1 << (place.bit_length() - 1))
            start, step = offsets[before], steps.get((before, place))
            offsets.append(None if start is None or step is None else start + step)
        known = [offset for offset in offsets if offset is not None]
        middle = statistics.median_low(known) if len(known) > 2 else 0.0
        return [None if offset is None else offset - middle for offset in offsets]


_GPUS, _DRIVER = Path("/proc/driver/nvidia/gpus"), Path("/proc/driver/nvidia/version")


def _collect(launch: Launch, chosen: tuple[str, bool], address: str, gather: Gather) -> WorldFacts:
    """Return what all processes report, the same on every rank. Collective."""
    found = json.dumps(installed_versions(), sort_keys=True)
    devices = visible(by_uuid=True)
    cores = os.sched_getaffinity(0)
    mine = ProcessFacts(
        launch.rank,
        own_node(),
        socket.gethostname(),
        launch.local_rank,
        address,
        _interface(address),
        hashlib.sha256(found.encode()).hexdigest()[:16],
        *chosen,
        devices,
        [str(accelerator.module().get_device_name(index)) for index in range(len(devices))],
        len(list(_GPUS.glob("*"))) if torch.version.cuda else 0,
        [_node(index) for index in range(len(devices))],
        sorted(cores),
        sorted(node for node, numbers in cores_by_node().items() if numbers & cores),
        os.cpu_count() or len(cores),
        visible(),
    )
    processes = [ProcessFacts(**json.loads(text)) for text in gather(json.dumps(asdict(mine)))]
    digests, nodes = ([getattr(one, name) for one in processes] for name in ("versions", "node"))
    # One rank for each different digest sends the versions, and the first rank of each host measures its links.
    texts = gather(found if digests.index(mine.versions) == launch.rank else "")
    known = {digest: json.loads(text) for digest, text in zip(digests, texts, strict=True) if text}
    hosts = list(dict.fromkeys(nodes))
    place = hosts.index(mine.node) if nodes.index(mine.node) == launch.rank else None
    return WorldFacts(processes, known, measure_links(place, len(hosts), address, gather))


def installed_versions() -> dict[str, str]:
    """Return the version of Python, of torch's build, of NVIDIA's driver, and of every installed package. Local."""
    found: dict[str, str] = {}
    for package in importlib.metadata.distributions():
        # A package without a name is the rest of an incomplete removal.
        name = package.metadata["Name"] if package.metadata else None
        if name:
            # Python imports the first one on its path.
            found.setdefault(name.lower().replace("_", "-"), package.version)
    found |= {"Python": platform.python_version(), "torch": torch.__version__}
    if _DRIVER.exists():
        found["NVIDIA driver"] = _DRIVER.read_text().partition("\n")[0]
    return found


def _chosen(launch: Launch, env: Mapping[str, str], backend: str | None, transport: str | None) -> tuple[str, bool]:
    """Return the backend that init() would choose and True, or its error and False."""
    try:
        chosen = choose(backend, transport, launch, env)
        if chosen.transport is not None:
            chosen.backend.check(chosen.transport, launch)
    except ConfigurationError as error:
        return str(error), False
    return "+".join(filter(None, (chosen.backend.name, chosen.transport))), True


def _interface(address: str) -> str:
    with contextlib.suppress(ConfigurationError):
        return interface_of(address)
    return ""


def _node(index: int) -> int:
    found = accelerator.module().get_device_properties(index)
    if not hasattr(found, "pci_bus_id"):
        return -1
    return numa_node(f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0")


# What is wrong in a world, found by comparing what its processes have reported. Pure functions.

_CLOCK_SECONDS = 1.0
"""Clocks may differ by this much. torchrun drops a host whose clock is behind, because it compares the times of
heartbeats (torch/distributed/elastic/rendezvous/dynamic_rendezvous.py:_BackendRendezvousStateHolder._sanitize)."""
_SLOW = 3
"""A link is slow if it transfers this many times less than the others."""
_LATE, _SHORTEST_LATE, _LONGEST_GOOD = 5, 1e-3, 5e-3
"""A link is slow if its round trip is this many times longer than the others' and longer than a millisecond, or longer
than 5 ms (seconds). Hosts in one data centre need less than 1 ms."""


class Problem(NamedTuple):
    """Something that is wrong."""

    kind: str
    hosts: tuple[str, ...]
    """The names of the hosts on which it is wrong."""
    ranks: tuple[int, ...]
    text: str
    """One or two sentences: what is wrong, and what to do."""


def find_problems(world: WorldFacts, least_bandwidth: float) -> list[Problem]:
    """Return what is wrong. least_bandwidth: of a link, in bytes per second."""
    return [
        *_backends(world),
        *_versions(world),
        *_clocks(world),
        *_links(world, least_bandwidth),
        *_gpus(world),
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
            text = (
                f"All ranks must choose the same backend, but {_where(processes)} chooses {backend} and the others "
                f"{usual}. Set DUALDIST_BACKEND for all processes, or install the same packages on all hosts."
            )
            yield _problem("backend", processes, text)


def _versions(world: WorldFacts) -> Iterator[Problem]:
    for name in sorted({name for found in world.versions.values() for name in found}):
        usual, others = _split((world.versions[one.versions].get(name), one) for one in world.processes)
        for version, processes in others.items():
            text = (
                f"{name} must be the same version everywhere, but is {version or 'absent'} on {_where(processes)} and "
                f"{usual or 'absent'} on the others. Install the same version, or look at PATH and PYTHONPATH there."
            )
            yield _problem("version", processes, text)


def _clocks(world: WorldFacts) -> Iterator[Problem]:
    for processes, offset in zip(world.hosts, world.clocks, strict=True):
        if offset is not None and abs(offset) > _CLOCK_SECONDS:
            side = "ahead of" if offset > 0 else "behind"
            others = "the others'" if len(world.hosts) > 2 else f"that of {world.hosts[0][0].host}"
            clock = f"The clock of {processes[0].host} is {abs(offset):.1f} s {side} {others}."
            yield _problem("clock", processes, f"{clock} Start NTP (chrony) there.")


def _links(world: WorldFacts, least_bandwidth: float) -> Iterator[Problem]:
    rates = [link.bandwidth or 0.0 for link in world.links if not link.problem]
    trips = [link.round_trip for link in world.links if link.round_trip is not None]
    usual_rate = statistics.median_high(rates) if rates else 0.0
    usual_trip = statistics.median_low(trips) if trips else 0.0
    longest = min(_LONGEST_GOOD, max(_SHORTEST_LATE, _LATE * usual_trip))
    for link in world.links:
        ends = [world.hosts[link.source][0], world.hosts[link.target][0]]
        names = f"from {ends[0].host} to {ends[1].host}"
        if link.problem:
            fix = "Open the firewall between them, or set DUALDIST_INTERFACE."
            yield _problem("link", ends, f"There is no connection {names} at {link.problem}. {fix}")
            continue
        slow = f"The link {names} ({ends[0].interface} to {ends[1].interface}) is slow:"
        rate, trip = link.bandwidth or 0.0, link.round_trip or 0.0
        if rate < max(least_bandwidth, usual_rate / _SLOW):
            usual = f"{max(least_bandwidth, usual_rate) / 1e6:.1f} MB/s are usual or required"
            fix = "Check cable, switch port and MTU, or choose another network with DUALDIST_INTERFACE."
            yield _problem("link", ends, f"{slow} {rate / 1e6:.1f} MB/s, where {usual}. {fix}")
        if trip > longest:
            good = f"but should take less than {longest * 1e3:.1f} ms."
            yield _problem("link", ends, f"{slow} a round trip takes {trip * 1e3:.1f} ms, {good}")


def _gpus(world: WorldFacts) -> Iterator[Problem]:
    for processes in world.hosts:
        blind = [process for process in processes if process.installed_gpus and not process.devices]
        if blind:
            seen = f"torch sees no GPU on {_where(blind)}, although the driver lists"
            fix = "Look at CUDA_VISIBLE_DEVICES, and whether this torch supports the driver."
            yield _problem("gpu", blind, f"{seen} {blind[0].installed_gpus}. {fix}")
    usual, others = _split((_models(processes), processes[0]) for processes in world.hosts)
    for found, processes in others.items():
        hosts = ", ".join(process.host for process in processes)
        text = f"but {hosts} has {found or 'none'} and the others {usual or 'none'}."
        yield _problem("gpu", processes, f"All hosts must have the same GPUs, {text}")
    for node, ranks, devices in shared_devices(world.views, choose_devices(world.views)):
        processes = [process for process in world.processes if process.node == node]
        text = f"{ranks} processes share {devices} GPUs on {processes[0].host}."
        yield _problem("gpu", processes, f"{text} Start one process for each GPU.")


def find_warnings(world: WorldFacts) -> list[Problem]:
    """Return what makes training slower, but does not prevent it."""
    return [*_far_gpus(world), *_crowded_cores(world), *_no_nvlink(world)]


def _no_nvlink(world: WorldFacts) -> Iterator[Problem]:
    for node in confined_hosts(world.views):
        processes = [process for process in world.processes if process.node == node]
        yield _problem("nvlink", processes, NO_NVLINK % processes[0].host)


def _far_gpus(world: WorldFacts) -> Iterator[Problem]:
    far = [
        process
        for process, index in zip(world.processes, choose_devices(world.views), strict=True)
        if index is not None and process.device_nodes[index] not in {-1, *process.core_nodes}
    ]
    if far:
        text = f"Cores and GPU must be on the same NUMA node, but are not on {_where(far)}. Use `dualdist exec --bind "
        text += "numa`, or the binding of the launcher (srun --gpu-bind=closest, mpirun --map-by numa)."
        yield _problem("numa", far, text)


def _crowded_cores(world: WorldFacts) -> Iterator[Problem]:
    crowded: list[ProcessFacts] = []
    for processes in world.hosts:
        # Where several sets of cores are too small, the smallest one shows it.
        for cores in sorted({tuple(process.cores) for process in processes}, key=len):
            inside = [process for process in processes if set(process.cores) <= set(cores)]
            if len(cores) < min(len(inside), inside[0].installed_cores):
                crowded += inside
                break
    if crowded:
        first = crowded[0]
        yield _problem(
            "cores",
            crowded,
            f"Each process must have a core, but several are bound to the same ones on {_where(crowded)}: rank "
            f"{first.rank} to {_ranges(first.cores)} of {first.installed_cores} cores. Give each its own (srun "
            "--cpus-per-task=2, mpirun --map-by slot:PE=2), or bind none (mpirun --bind-to none).",
        )


def _models(processes: Sequence[ProcessFacts]) -> str:
    """Return the models of all GPUs that the processes of a host see, such as '2 x H100'."""
    gpus = {pair for process in processes for pair in zip(process.devices, process.models, strict=True)}
    counts = Counter(model for _, model in gpus)
    return ", ".join(f"{count} x {model}" for model, count in sorted(counts.items()))


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


def _where(processes: Sequence[ProcessFacts]) -> str:
    """Return such as 'beta (ranks 2, 3)', or the first of many hosts and their number."""
    hosts: dict[str, list[int]] = {}
    for process in processes:
        hosts.setdefault(process.host, []).append(process.rank)
    shown = [f"{host} ({shown_ranks(ranks)})" for host, ranks in list(hosts.items())[:8]]
    return ", ".join(shown) + (f" and {len(hosts) - 8} other hosts" if len(hosts) > 8 else "")


def _problem(kind: str, processes: Sequence[ProcessFacts], text: str) -> Problem:
    hosts = tuple(dict.fromkeys(process.host for process in processes))
    return Problem(kind, hosts, tuple(sorted({process.rank for process in processes})), text)


# The report, in the types of JSON and as text.

_MOST_LINKS, _MOST_RANGES = 16, 8
"""How many links the text lists. Of more links it shows the slowest. And how many ranges of numbers it shows."""


def as_json(launcher: str, world: WorldFacts, problems: Sequence[Problem]) -> dict[str, Any]:
    """Return the report. The clocks are in seconds, round trips too, bandwidths in bytes per second."""
    names = [processes[0].host for processes in world.hosts]
    return {
        "launcher": launcher,
        "size": len(world.processes),
        "backend": world.processes[0].backend,
        "hosts": [
            {
                "host": processes[0].host,
                "ranks": [process.rank for process in processes],
                "address": processes[0].address,
                "interface": processes[0].interface,
                "clock": clock,
                "gpus": _models(processes),
            }
            for processes, clock in zip(world.hosts, world.clocks, strict=True)
        ],
        "ranks": [
            {
                "rank": process.rank,
                "host": process.host,
                "cores": list(process.cores),
                "core_nodes": list(process.core_nodes),
                "gpu": None if index is None else process.devices[index],
                "gpu_node": None if index is None else process.device_nodes[index],
            }
            for process, index in zip(world.processes, choose_devices(world.views), strict=True)
        ],
        "links": [asdict(link) | {"source": names[link.source], "target": names[link.target]} for link in world.links],
        "problems": [problem._asdict() for problem in problems],
        "warnings": [problem._asdict() for problem in find_warnings(world)],
        "can_train": not problems,
    }


def as_text(report: Mapping[str, Any]) -> str:
    """Return the report that `as_json` made, for people."""
    hosts, links, problems = report["hosts"], report["links"], report["problems"]
    world = f"World of {_count(report['size'], 'process', 'es')} on {_count(len(hosts), 'host')}"
    return "\n".join(
        [
            f"{world}, started by {report['launcher']}; backend: {report['backend']}",
            "",
            *_table(_host_rows(hosts)),
            "",
            *_table(_rank_rows(report["ranks"])),
            "",
            *([*_table(_link_rows(links)), ""] if links else []),
            *(f"WARNING: {problem['text']}" for problem in report["warnings"]),
            *(f"WRONG: {problem['text']}" for problem in problems),
            f"{_count(len(problems), 'problem')} must be solved first." if problems else "This allocation can train.",
        ]
    )


def _host_rows(hosts: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, ...]]:
    yield "host", "ranks", "address", "clock", "GPUs"
    for host in hosts:
        yield (
            host["host"],
            _ranges(host["ranks"]),
            f"{host['address']} ({host['interface'] or '?'})",
            "?" if host["clock"] is None else f"{host['clock']:+.3f} s",
            host["gpus"] or "none",
        )


def _rank_rows(ranks: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, ...]]:
    """Ranks of several hosts that have the same place there are in one row."""
    yield "ranks", "cores", "NUMA node", "GPU", "its NUMA node"
    rows: dict[tuple[str, ...], list[int]] = {}
    for rank in ranks:
        node = rank["gpu_node"]
        gpu = ("none", "") if rank["gpu"] is None else (rank["gpu"], "?" if node < 0 else str(node))
        row = (_ranges(rank["cores"]), _ranges(rank["core_nodes"]) or "?", *gpu)
        rows.setdefault(row, []).append(rank["rank"])
    for row, found in rows.items():
        yield _ranges(found), *row


def _ranges(numbers: Sequence[int]) -> str:
    """Return ascending numbers such as 0-3,8; of many ranges the first ones."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][-1] + 1:
            ranges[-1][1:] = [number]
        else:
            ranges.append([number])
    shown = ",".join("-".join(map(str, ends)) for ends in ranges[:_MOST_RANGES])
    return f"{shown},... ({len(numbers)})" if len(ranges) > _MOST_RANGES else shown


def _link_rows(links: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, ...]]:
    yield "link", "round trip", "bandwidth"
    for link in sorted(links, key=lambda link: link["bandwidth"] or 0.0)[:_MOST_LINKS]:
        trip = link["round_trip"]
        yield (
            f"{link['source']} to {link['target']}",
            "none" if trip is None else f"{trip * 1e3:.2f} ms",
            "none" if trip is None else f"{(link['bandwidth'] or 0.0) / 1e6:.1f} MB/s",
        )
    if len(links) > _MOST_LINKS:
        yield f"({len(links) - _MOST_LINKS} faster links)", "", ""


def _table(rows: Iterator[tuple[str, ...]]) -> Iterator[str]:
    table = list(rows)
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        yield f"  {'  '.join(cells)}".rstrip()


def _count(number: int, noun: str, plural: str = "s") -> str:
    return f"{number} {noun}{plural * (number != 1)}"
