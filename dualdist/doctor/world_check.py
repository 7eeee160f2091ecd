"""`dualdist doctor --world`: the processes of a launch meet, report what they have, and rank 0 compares it.

world_links.py measures the links between the hosts.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import itertools
import json
import os
import platform
import socket
import statistics
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
from ..core.types import DeviceView, Launch
from ..devices.choice import NO_NVLINK, choose_devices, confined_hosts, shared_devices, visible
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
    failed: list[str] = []

    def fail(error: str, is_own: bool = True) -> None:
        if is_own and error not in failed:
            problem = Problem("arrival", (), (), error)._asdict()
            facts = {"launcher": launch.launcher, "size": launch.size, "problems": [problem], "can_train": False}
            print(json.dumps(facts, indent=2) if is_json else f"WRONG: {error}", flush=True)
        failed.append(error)

    try:
        # When a process ends, the launcher may end the one that has not printed yet.
        with mpi.limited_start(env, timeout) as limit, contextlib.ExitStack() as stack:
            limit.announce(launch)
            meeting = stack.enter_context(meet(launch, env, timeout, fail))
            address = find_addresses(launch.rank, meeting.gather, env).own
            world = _collect(launch, _chosen(launch, env, backend, transport), address, meeting.gather)
            code = 0
            if launch.rank == 0:
                report = as_json(launch.launcher, world, find_problems(world, least_bandwidth))
                print(json.dumps(report, indent=2) if is_json else as_text(report), flush=True)
                code = int(not report["can_train"])
            return int(meeting.gather(str(code))[0])
    except ConfigurationError as error:
        fail(str(error))
        return 1


# What the processes report.


@dataclass(frozen=True)
class ProcessFacts:
    """One process, in the types of JSON.

    node: a name that no other host has (own_node). address: its IPv4 address for the others. versions: a digest of the
    versions of its packages. backend: the one that init() would choose, or its error if none is usable. devices: a name
    of each that torch sees, the same in all processes of a host. models, device_nodes: of these devices (node -1:
    unknown). device_numbers: as in DeviceView. installed_gpus: how many NVIDIA's driver lists, if torch was built for
    CUDA. cores, core_nodes: the CPUs on which it may run, in order, and their NUMA nodes. installed_cores: those of the
    host.
    """

    rank: int
    node: str
    host: str
    local_rank: int | None
    address: str
    interface: str
    versions: str
    backend: str
    usable: bool
    devices: Sequence[str]
    models: Sequence[str]
    installed_gpus: int
    device_nodes: Sequence[int]
    cores: Sequence[int]
    core_nodes: Sequence[int]
    installed_cores: int
    device_numbers: Sequence[str] = ()


@dataclass(frozen=True)
class WorldFacts:
    """What all processes have reported, in rank order. versions: those of packages, for each different digest."""

    processes: Sequence[ProcessFacts]
    versions: Mapping[str, Mapping[str, str]]
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
    found = json.dumps(_installed_versions(), sort_keys=True)
    devices, cores = visible(by_uuid=True), os.sched_getaffinity(0)
    indices, interface = range(len(devices)), ""
    with contextlib.suppress(ConfigurationError):
        interface = interface_of(address)
    mine = ProcessFacts(
        rank=launch.rank,
        node=own_node(),
        host=socket.gethostname(),
        local_rank=launch.local_rank,
        address=address,
        interface=interface,
        versions=hashlib.sha256(found.encode()).hexdigest()[:16],
        backend=chosen[0],
        usable=chosen[1],
        devices=devices,
        models=[str(accelerator.module().get_device_name(index)) for index in indices],
        installed_gpus=len(list(_GPUS.glob("*"))) if torch.version.cuda else 0,
        device_nodes=list(map(_node, indices)),
        cores=sorted(cores),
        core_nodes=sorted(node for node, numbers in cores_by_node().items() if numbers & cores),
        installed_cores=os.cpu_count() or len(cores),
        device_numbers=visible(),
    )
    processes = [ProcessFacts(**json.loads(text)) for text in gather(json.dumps(asdict(mine)))]
    digests, nodes = ([getattr(one, name) for one in processes] for name in ("versions", "node"))
    # One rank for each different digest sends the versions, and the first rank of each host measures its links.
    texts = gather(found if digests.index(mine.versions) == launch.rank else "")
    known = {digest: json.loads(text) for digest, text in zip(digests, texts, strict=True) if text}
    hosts = list(dict.fromkeys(nodes))
    place = hosts.index(mine.node) if nodes.index(mine.node) == launch.rank else None
    return WorldFacts(processes, known, measure_links(place, len(hosts), address, gather))


def _installed_versions() -> dict[str, str]:
    """Return the version of Python, of torch's build, of NVIDIA's driver, and of every installed package."""
    found: dict[str, str] = {}
    for package in importlib.metadata.distributions():
        # A package without a name is the rest of an incomplete removal. Python imports the first one on its path.
        if name := package.metadata["Name"] if package.metadata else None:
            found.setdefault(name.lower().replace("_", "-"), package.version)
    found |= {"Python": platform.python_version(), "torch": torch.__version__}
    return found | ({"NVIDIA driver": _DRIVER.read_text().partition("\n")[0]} if _DRIVER.exists() else {})


def _chosen(launch: Launch, env: Mapping[str, str], backend: str | None, transport: str | None) -> tuple[str, bool]:
    """Return the backend that init() would choose and True, or its error and False."""
    try:
        chosen = choose(backend, transport, launch, env)
        if chosen.transport is not None:
            chosen.backend.check(chosen.transport, launch)
    except ConfigurationError as error:
        return str(error), False
    return "+".join(filter(None, (chosen.backend.name, chosen.transport))), True


def _node(index: int) -> int:
    found = accelerator.module().get_device_properties(index)
    bus = hasattr(found, "pci_bus_id")
    return numa_node(f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0") if bus else -1


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
    """Something that is wrong, on the hosts with these names. text: one or two sentences, with what to do."""

    kind: str
    hosts: tuple[str, ...]
    ranks: tuple[int, ...]
    text: str


def find_problems(world: WorldFacts, least_bandwidth: float) -> list[Problem]:
    """Return what is wrong. least_bandwidth: of a link, in bytes per second."""
    links = _links(world, least_bandwidth)
    return [*_backends(world), *_versions(world), *_clocks(world), *links, *_gpus(world)]


def _backends(world: WorldFacts) -> Iterator[Problem]:
    broken: dict[str, list[ProcessFacts]] = {}
    for process in world.processes:
        if not process.usable:
            broken.setdefault(process.backend, []).append(process)
    for error, processes in broken.items():
        yield _problem("backend", processes, f"init() raises an error on {_where(processes)}: {error}")
    if not broken:
        text = "All ranks must choose the same backend, but {where} chooses {value} and the others {usual}. Set "
        text += "DUALDIST_BACKEND for all processes, or install the same packages on all hosts."
        yield from _unlike("backend", text, "", ((process.backend, process) for process in world.processes))


def _versions(world: WorldFacts) -> Iterator[Problem]:
    for name in sorted({name for found in world.versions.values() for name in found}):
        text = f"{name} must be the same version everywhere, but is {{value}} on {{where}} and {{usual}} on the others."
        text += " Install the same version, or look at PATH and PYTHONPATH there."
        pairs = ((world.versions[one.versions].get(name), one) for one in world.processes)
        yield from _unlike("version", text, "absent", pairs)


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
    text = "All hosts must have the same GPUs, but {hosts} has {value} and the others {usual}."
    yield from _unlike("gpu", text, "none", ((_models(processes), processes[0]) for processes in world.hosts))
    for node, ranks, devices in shared_devices(world.views, choose_devices(world.views)):
        processes = [process for process in world.processes if process.node == node]
        text = f"{ranks} processes share {devices} GPUs on {processes[0].host}."
        yield _problem("gpu", processes, f"{text} Start one process for each GPU.")


def find_warnings(world: WorldFacts) -> list[Problem]:
    """Return what makes training slower, but does not prevent it."""
    found = [*_far_gpus(world), *_crowded_cores(world)]
    for node in confined_hosts(world.views):
        processes = [process for process in world.processes if process.node == node]
        found.append(_problem("nvlink", processes, NO_NVLINK % processes[0].host))
    return found


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
        one = crowded[0]
        text = "Each process must have a core, but several are bound to the same ones on "
        text += f"{_where(crowded)}: rank {one.rank} to {_ranges(one.cores)} of {one.installed_cores} cores. Give each "
        text += "its own (srun --cpus-per-task=2, mpirun --map-by slot:PE=2), or bind none (mpirun --bind-to none)."
        yield _problem("cores", crowded, text)


def _models(processes: Sequence[ProcessFacts]) -> str:
    """Return the models of all GPUs that the processes of a host see, such as '2 x H100'."""
    gpus = {pair for process in processes for pair in zip(process.devices, process.models, strict=True)}
    counts = Counter(model for _, model in gpus)
    return ", ".join(f"{count} x {model}" for model, count in sorted(counts.items()))


def _unlike(kind: str, text: str, none: str, pairs: Iterable[tuple[str | None, ProcessFacts]]) -> Iterator[Problem]:
    """Yield a problem for each value that is not that of most hosts. Equal numbers of hosts: rank 0's value is right.

    text: with names in braces for what differs. none: what is said where there is no value.
    """
    processes: dict[str, list[ProcessFacts]] = {}
    for value, process in pairs:
        processes.setdefault(value or none, []).append(process)
    # max returns the first of equals.
    usual = max(processes, key=lambda value: len({process.node for process in processes[value]}))
    for value, found in processes.items():
        if value != usual:
            hosts = ", ".join(process.host for process in found)
            yield _problem(kind, found, text.format(value=value, usual=usual, where=_where(found), hosts=hosts))


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
    hosts: list[dict[str, Any]] = []
    ranks: list[dict[str, Any]] = []
    for processes, clock in zip(world.hosts, world.clocks, strict=True):
        facts = {name: getattr(processes[0], name) for name in ("host", "address", "interface")}
        numbers = [process.rank for process in processes]
        hosts.append(facts | {"ranks": numbers, "clock": clock, "gpus": _models(processes)})
    for process, index in zip(world.processes, choose_devices(world.views), strict=True):
        facts = {name: getattr(process, name) for name in ("rank", "host", "cores", "core_nodes")}
        gpu = (None, None) if index is None else (process.devices[index], process.device_nodes[index])
        ranks.append(facts | dict(zip(("gpu", "gpu_node"), gpu, strict=True)))
    return {
        "launcher": launcher,
        "size": len(world.processes),
        "backend": world.processes[0].backend,
        "hosts": hosts,
        "ranks": ranks,
        "links": [asdict(link) | {"source": names[link.source], "target": names[link.target]} for link in world.links],
        "problems": [problem._asdict() for problem in problems],
        "warnings": [problem._asdict() for problem in find_warnings(world)],
        "can_train": not problems,
    }


def as_text(report: Mapping[str, Any]) -> str:
    """Return the report that `as_json` made, for people."""
    hosts, links, problems = report["hosts"], report["links"], report["problems"]
    world = f"World of {_count(report['size'], 'process', 'es')} on {_count(len(hosts), 'host')}"
    lines = [f"{world}, started by {report['launcher']}; backend: {report['backend']}", ""]
    tables = [[*_host_rows(hosts)], [*_rank_rows(report["ranks"])], *([[*_link_rows(links)]] if links else [])]
    for rows in tables:
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines += [*(f"  {'  '.join(map(str.ljust, row, widths))}".rstrip() for row in rows), ""]
    lines += [f"WARNING: {problem['text']}" for problem in report["warnings"]]
    lines += [f"WRONG: {problem['text']}" for problem in problems]
    left = f"{_count(len(problems), 'problem')} must be solved first." if problems else "This allocation can train."
    return "\n".join([*lines, left])


def _host_rows(hosts: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, ...]]:
    yield "host", "ranks", "address", "clock", "GPUs"
    for host in hosts:
        clock = "?" if host["clock"] is None else f"{host['clock']:+.3f} s"
        address = f"{host['address']} ({host['interface'] or '?'})"
        yield host["host"], _ranges(host["ranks"]), address, clock, host["gpus"] or "none"


def _rank_rows(ranks: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, ...]]:
    """Ranks of several hosts that have the same place there are in one row."""
    yield "ranks", "cores", "NUMA node", "GPU", "its NUMA node"
    rows: dict[tuple[str, ...], list[int]] = {}
    for rank in ranks:
        node = rank["gpu_node"]
        gpu = ("none", "") if rank["gpu"] is None else (rank["gpu"], "?" if node < 0 else str(node))
        row = (_ranges(rank["cores"]), _ranges(rank["core_nodes"]) or "?", *gpu)
        rows.setdefault(row, []).append(rank["rank"])
    yield from ((_ranges(found), *row) for row, found in rows.items())


def _ranges(numbers: Sequence[int]) -> str:
    """Return ascending numbers such as 0-3,8; of many ranges the first ones."""
    # In a range, numbers differ from their places by the same.
    ranges = itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])
    runs = [[number for _, number in run] for _, run in ranges]
    shown = ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs[:_MOST_RANGES])
    return f"{shown},... ({len(numbers)})" if len(runs) > _MOST_RANGES else shown


def _link_rows(links: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, ...]]:
    yield "link", "round trip", "bandwidth"
    for link in sorted(links, key=lambda link: link["bandwidth"] or 0.0)[:_MOST_LINKS]:
        numbers = f"{(link['round_trip'] or 0) * 1e3:.2f} ms", f"{(link['bandwidth'] or 0) / 1e6:.1f} MB/s"
        shown = ("none", "none") if link["round_trip"] is None else numbers
        yield f"{link['source']} to {link['target']}", *shown
    if len(links) > _MOST_LINKS:
        yield f"({len(links) - _MOST_LINKS} faster links)", "", ""


def _count(number: int, noun: str, plural: str = "s") -> str:
    return f"{number} {noun}{plural * (number != 1)}"
