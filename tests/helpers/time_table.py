"""`pytest --times` ends with a table of what each folder, file and world takes: seconds, and CPU of all processes.

Seconds without CPU time are waits. Of processes that have left the tree of pytest's, such as daemons, no time is known.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import psutil
import pytest

from .world import WORLDS

IN_WORLD = re.compile(rf"\[(?:.*-)?({'|'.join(WORLDS)})(?:-.*)?\]$")
"""Where the name of a test has that of its world."""


@dataclass
class _Row:
    tests: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0


class TimeTable:
    """A plugin of pytest. With pytest-xdist, each process measures its own tests and the processes below it."""

    def __init__(self) -> None:
        self._used = _cpu_seconds()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: Any) -> Generator[None, Any, Any]:
        report = yield
        before, self._used = self._used, _cpu_seconds()
        report.cpu_seconds = self._used - before  # pytest-xdist passes what a report has to the first process
        return report

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        rows: dict[str, _Row] = {}
        reports = [report for kind in terminalreporter.stats.values() for report in kind]
        for report in reports:
            if not hasattr(report, "cpu_seconds"):
                continue
            file = report.nodeid.partition("::")[0]
            worlds = (world[1] for world in [IN_WORLD.search(report.nodeid)] if world)
            for name in (file.rpartition("/")[0], file, *worlds, "all"):
                row = rows.setdefault(name, _Row())
                row.tests += report.when == "call"
                row.seconds += report.duration
                row.cpu_seconds += report.cpu_seconds
        terminalreporter.section("times")
        terminalreporter.line(f"{'tests':>6} {'seconds':>8} {'CPU':>8}")
        for name, row in sorted(rows.items(), key=lambda item: -item[1].seconds):
            terminalreporter.line(f"{row.tests:6} {row.seconds:8.1f} {row.cpu_seconds:8.1f} {name}")


def _cpu_seconds() -> float:
    """Return the CPU time of this process and of those below it, also of those that have ended."""
    this = psutil.Process()
    total = 0.0
    for process in (this, *this.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            total += sum(process.cpu_times()[:4])  # user, system; both of children that were waited for
    return total
