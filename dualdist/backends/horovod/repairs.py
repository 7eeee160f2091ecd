"""What ci/install-horovod has repaired in the installed Horovod, by the number that it adds to the version."""

from __future__ import annotations

import importlib.metadata
import re

__all__ = ("CONNECTS_ALL_PROCESS_SETS", "STARTS_WHILE_WAITING", "has_repair", "horovods_version")

CONNECTS_ALL_PROCESS_SETS = 2
"""The Gloo controller connects process sets of some ranks of several hosts."""
STARTS_WHILE_WAITING = 3
"""An operation can start while Horovod waits for other ranks, except while it connects a new process set."""


def horovods_version() -> str:
    """Return the version of the installed Horovod, as far as it is known: it may be used without an installation."""
    try:
        return importlib.metadata.version("horovod")
    except importlib.metadata.PackageNotFoundError:
        return "(unknown version)"


def has_repair(number: int, version: str) -> bool:
    """Return whether a Horovod of `version` has the repair `number`, one of the constants above."""
    found = re.search(r"\.patch(\d+)", version)
    return found is not None and int(found[1]) >= number
