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
import json
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from ..backends import BACKENDS, TRANSPORTS
from .facts import collect
from .smoke import smoke
from .world_check import check_world

__all__ = ("add_arguments", "execute")


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
