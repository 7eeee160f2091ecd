"""The report of `dualdist doctor --world`, as text and in the types of JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from .problems import Problem, WorldFacts

__all__ = ("as_json", "as_text")

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
