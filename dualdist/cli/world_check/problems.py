"""What is wrong in a world, found by comparing what its processes have reported. Pure functions."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ...launch import DeviceView, choose_devices, shared_devices
from .links import Link, clock_offsets
from .process_facts import ProcessFacts

__all__ = ("Problem", "WorldFacts", "find_problems")

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
