"""Runs contestants in rounds: each in processes of its own, in a new random order in each round."""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from contestant import Contestant

from dualdist.launch.environment import without_launchers

__all__ = ("Ratio", "Rounds", "ratio", "run_rounds")

_SECONDS = 300.0
"""The longest that one contestant may take in one round."""
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OMPI_MCA_hwloc_base_binding_policy": "none",  # Open MPI 4
    "PRTE_MCA_hwloc_default_binding_policy": "none",  # Open MPI 5
}
"""The same threads and processors for all: torchrun limits threads, mpirun binds each process to a core."""

Figures = Mapping[str, float]


@dataclass(frozen=True)
class Rounds:
    """What was measured."""

    figures: Mapping[str, Sequence[Figures]]
    """contestant -> its figures of each round: name -> the largest value of all processes."""
    left_out: Mapping[str, str]
    """contestant -> why it did not run, or failed."""


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
) -> Rounds:
    """Run `worker`, a script in this folder, with FOLDER, a contestant's name and `arguments`, `rounds` times each.

    Each process writes its figures into FOLDER/RANK.json.
    """
    left_out = {name: why for name, contestant in contestants.items() if (why := contestant.missing())}
    figures: dict[str, list[Figures]] = {name: [] for name in contestants if name not in left_out}
    shuffler = random.Random(0)
    for number in range(rounds):
        for name in shuffler.sample(list(figures), len(figures)):
            sys.stderr.write(f"round {number + 1} of {rounds}: {name}\n")
            found = _run(worker, name, contestants[name], arguments, processes)
            if isinstance(found, str):
                left_out[name] = found
                del figures[name]
            else:
                figures[name].append(found)
    return Rounds(figures, left_out)


def ratio(ours: Sequence[Figures], theirs: Sequence[Figures], figure: str) -> Ratio:
    """Return how `ours` compares with `theirs`, round by round."""
    values = [mine[figure] / yours[figure] for mine, yours in zip(ours, theirs, strict=True)]
    return Ratio(statistics.median(values), min(values), max(values))


def _run(
    worker: str, name: str, contestant: Contestant[Any], arguments: Sequence[str], processes: int
) -> Figures | str:
    """Return the figures of one round, or why there are none."""
    with tempfile.TemporaryDirectory() as folder:
        script = [str(Path(__file__).with_name(worker)), folder, name, *arguments]
        try:
            ended = subprocess.run(
                contestant.command(processes, script),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=_SECONDS,
                env=without_launchers(os.environ) | _ENVIRONMENT,
            )
        except subprocess.TimeoutExpired:
            return f"did not end within {_SECONDS:.0f} s"
        if ended.returncode:
            errors = [line for line in ended.stdout.splitlines() if "Error" in line]
            return errors[-1] if errors else f"exit code {ended.returncode}"
        found = [json.loads(path.read_text()) for path in Path(folder).glob("*.json")]
    return {figure: max(figures[figure] for figures in found) for figure in found[0]}
