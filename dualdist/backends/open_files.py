"""The limit of open files, which a large world needs to be higher than usual systems set it."""

from __future__ import annotations

import os
import resource

from ..errors import ConfigurationError

__all__ = ("allow_open_files",)

_GROUPS = 3
"""How many groups of Gloo connect all ranks: two of dualdist, and torch's default group."""
_SPARE = 256
"""For agreements, the start, data files and the like."""


def allow_open_files(size: int) -> None:
    """Raise this process's limit of open files if a world of `size` ranks needs more. Local.

    Rank 0 has one more connection to each rank while the world starts. Raises ConfigurationError if the hard limit is
    too low.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = len(os.listdir("/dev/fd")) + (_GROUPS + 1) * size + _SPARE
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed - _SPARE:
        raise ConfigurationError(
            f"The hard limit of open files must be at least {needed} for {size} ranks, but is {hard} instead. Raise it "
            "on this host (ulimit -Hn, LimitNOFILE of systemd, docker run --ulimit nofile)."
        )
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (needed if hard == resource.RLIM_INFINITY else min(needed, hard), hard)
    )
