"""The processes of a launch meet, measure, and agree on the exit code."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from ...backends import choose, load
from ...backends.store import SharedStore, open_store
from ...backends.store_gather import store_gather
from ...errors import ConfigurationError
from ...launch import detect
from ...rendezvous import Gather, mpi, reporting_errors
from ...rendezvous.mpi_start import limited_start
from ...types import Launch
from ...world.settings import read_settings
from .links import measure_links
from .problems import WorldFacts, find_problems
from .process_facts import ProcessFacts, versions
from .report import as_json, as_text

__all__ = ("check_world",)

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
