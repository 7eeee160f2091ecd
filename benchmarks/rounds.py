"""Runs contestants in rounds: each in processes of its own, in a new random order in each round.

Ctrl-C or SIGTERM ends the rounds; what was measured until then is kept.
"""

from __future__ import annotations

import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from contestant import Contestant

from dualdist.processes.job import without_launchers

__all__ = ("Ratio", "Rounds", "ratio", "run_rounds")

_SECONDS = 300.0
"""The longest that one contestant may take in one round."""
_END_SECONDS = 10.0
"""How long an interrupted contestant may take to end its processes."""
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OMPI_MCA_hwloc_base_binding_policy": "none",  # Open MPI 4
    "PRTE_MCA_hwloc_default_binding_policy": "none",  # Open MPI 5
    "OMPI_MCA_mpi_yield_when_idle": "1",
}
"""The same for all: torchrun limits threads, mpirun binds each process to a core, dualdist lets Open MPI yield."""

Figures = Mapping[str, float]


@dataclass(frozen=True)
class Rounds:
    """What was measured."""

    figures: Mapping[str, Sequence[Figures]]
    """contestant -> its figures of each round, from the first one: name -> the largest value of all processes."""
    left_out: Mapping[str, str]
    """contestant -> why it did not run, or failed. It keeps the figures of the rounds before it failed."""
    missing: int
    """How many rounds are not complete."""


@dataclass(frozen=True)
class Ratio:
    """The ratio of two contestants over the rounds."""

    median: float
    least: float
    greatest: float


def run_rounds(
    worker: str,
    contestants: Mapping[str, Contestant[Any]],
    arguments: Sequence[str],
    processes: int,
    rounds: int,
    report: Callable[[Rounds], None],
) -> Rounds:
    """Run `worker`, a script in this folder, with FOLDER, a contestant's name and `arguments`, `rounds` times each.

    Each process writes its figures into FOLDER/RANK.json. report: is called after each round of a contestant.
    """
    left_out = {name: why for name, contestant in contestants.items() if (why := contestant.missing())}
    figures: dict[str, list[Figures]] = {name: [] for name in contestants if name not in left_out}
    shuffler = random.Random(0)

    def measured() -> Rounds:
        # Counted from the figures, because an interruption can arrive between any two lines.
        counts = [len(rows) for name, rows in figures.items() if name not in left_out]
        return Rounds(figures, left_out, rounds - min(counts, default=rounds))

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        for number in range(rounds):
            names = [name for name in figures if name not in left_out]
            for name in shuffler.sample(names, len(names)):
                found = _run(worker, name, contestants[name], arguments, processes)
                if isinstance(found, str):
                    left_out[name] = found = f"in round {number + 1}: {found}"
                else:
                    figures[name].append(found)
                report(measured())
                sys.stderr.write(f"round {number + 1} of {rounds}: {name}: {_text(found)}\n")
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
    return measured()


def ratio(ours: Sequence[Figures], theirs: Sequence[Figures], figure: str) -> Ratio:
    """Return how `ours` compares with `theirs`, over the rounds of both: at least one."""
    values = [mine[figure] / yours[figure] for mine, yours in zip(ours, theirs, strict=False)]
    return Ratio(statistics.median(values), min(values), max(values))


def _text(found: Figures | str) -> str:
    if isinstance(found, str):
        return found
    return ", ".join(f"{figure} {value:.2f}" for figure, value in found.items())


def _run(
    worker: str, name: str, contestant: Contestant[Any], arguments: Sequence[str], processes: int
) -> Figures | str:
    """Return the figures of one round, or why there are none."""
    with tempfile.TemporaryDirectory() as folder:
        script = [str(Path(__file__).with_name(worker)), folder, name, *arguments]
        with subprocess.Popen(
            contestant.command(processes, script),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=without_launchers(os.environ) | _ENVIRONMENT,
        ) as launcher:
            try:
                output, _ = launcher.communicate(timeout=_SECONDS)
            except subprocess.TimeoutExpired:
                _end(launcher)
                return f"did not end within {_SECONDS:.0f} s"
            except KeyboardInterrupt:
                _end(launcher)
                raise
        if launcher.returncode:
            errors = [line for line in output.splitlines() if "Error" in line]
            return errors[-1] if errors else f"exit code {launcher.returncode}"
        found = [json.loads(path.read_text()) for path in Path(folder).glob("*.json")]
    if not found:
        return "wrote no figures"
    return {figure: max(figures[figure] for figures in found) for figure in found[0]}


def _end(launcher: subprocess.Popen[str]) -> None:
    """End the launcher, which ends its processes."""
    launcher.terminate()
    try:
        launcher.communicate(timeout=_END_SECONDS)
    except subprocess.TimeoutExpired:
        launcher.kill()
