"""Who is measured. Each contestant has processes of its own, because libraries in one process disturb each other."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

__all__ = ("Contestant",)

Member = TypeVar("Member")


@dataclass(frozen=True)
class Contestant(Generic[Member]):
    """A library, with the transport that carries its data."""

    join: Callable[[], Member]
    """Joins the contestant's world, and returns what to measure. Collective."""
    packages: tuple[str, ...] = ()
    """What must be installed beside torch."""
    uses_mpi: bool = False
    """Whether mpirun starts it, else `dualdist run`."""
    takes_hooks: bool = False
    """Whether it has torch's communication hooks."""
    is_single: bool = False
    """Whether it is one process, however many there are of the others."""

    def missing(self) -> str | None:
        """Return why it cannot run here; None if it can."""
        absent = [name for name in self.packages if importlib.util.find_spec(name) is None]
        if absent:
            return f"{', '.join(absent)} not installed"
        return "no mpirun on PATH" if self.uses_mpi and shutil.which("mpirun") is None else None

    def command(self, processes: int, script: Sequence[str]) -> list[str]:
        """Return the command line that runs the Python script and arguments `script` in all processes."""
        # Not at the top: a process that is measured must not import dualdist for other contestants.
        from dualdist.processes.hosts import mpirun_command

        python = [sys.executable, *script]
        if self.is_single:
            return python
        if self.uses_mpi:
            return mpirun_command(processes, python) or python
        return [sys.executable, "-m", "dualdist", "run", "-np", str(processes), *python]
