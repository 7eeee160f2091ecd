"""Which process has started those of a job on this node: what tells one job from any other."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import NamedTuple

__all__ = ("Starter", "find_starter")


class Starter(NamedTuple):
    """A process, and when it began, in clock ticks since the machine did: a number alone is given again."""

    pid: int
    began: int

    def is_alive(self) -> bool:
        """Return whether it still runs."""
        with contextlib.suppress(OSError):
            return _began(self.pid) == self.began
        return False


def find_starter(variable: str) -> Starter:
    """Return the process that has started this one with `variable` set.

    It is the nearest ancestor whose own environment does not have it: shells may stand between.
    """
    mark, pid = f"{variable}=".encode(), os.getppid()
    while True:
        with contextlib.suppress(OSError):  # that of another user, such as Slurm's
            if any(
                entry.startswith(mark) for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            ):
                pid = int(_status(pid)[1])
                continue
        return Starter(pid, _began(pid))


def _began(pid: int) -> int:
    return int(_status(pid)[19])


def _status(pid: int) -> list[str]:
    """Return the fields of proc(5)'s stat after the command's name: state, parent, ..., the 20th: start time."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
