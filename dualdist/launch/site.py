"""Launchers that a site adds to the table: with environment variables, or with a package that registers a row.

A package registers a Launcher, or a tuple of them, as an entry point of the group "dualdist.launchers". It is read only
where no row of the table describes the process.
"""

from __future__ import annotations

import functools
import importlib.metadata
from collections.abc import Mapping

from ..errors import ConfigurationError
from .launchers import DUALDIST_RUN, SITE, SPAWN, Launcher

__all__ = ("NAMED_BY", "registered_launchers", "site_launcher")

NAMED_BY = {
    "rank": "DUALDIST_RANK_FROM",
    "size": "DUALDIST_SIZE_FROM",
    "local_rank": "DUALDIST_LOCAL_RANK_FROM",
    "local_size": "DUALDIST_LOCAL_SIZE_FROM",
}
"""Field of Launcher -> the variable that names the variable with this number."""

_GROUP = "dualdist.launchers"


def site_launcher(env: Mapping[str, str]) -> Launcher | None:
    """Return the launcher that DUALDIST_RANK_FROM and the others describe, None when none of them is set.

    Raises ConfigurationError when the rank or the size is not named, or a variable that is named is absent.
    """
    names = {field: env[setting] for field, setting in NAMED_BY.items() if env.get(setting)}
    if not names:
        return None
    for field in ("rank", "size"):
        if field not in names:
            present = NAMED_BY[next(iter(names))]
            raise ConfigurationError(
                f"`{NAMED_BY[field]}` must be set beside {present}, but is absent. "
                f"Set it to the name of the variable with the {field}, or unset {present}."
            )
    for field, name in names.items():
        if not env.get(name):
            raise ConfigurationError(
                f"`{name}` must be set, because {NAMED_BY[field]} names it, but is absent. Start with the launcher "
                f"that sets it, unset {NAMED_BY[field]}, or set DUALDIST_LAUNCHER=python to run a single process."
            )
    return Launcher(
        SITE,
        rank=names["rank"],
        size=names["size"],
        local_rank=names.get("local_rank"),
        local_size=names.get("local_size"),
        markers=(NAMED_BY["rank"],),
        inside=(DUALDIST_RUN, SPAWN),
        is_command=False,
    )


@functools.cache
def registered_launchers() -> tuple[Launcher, ...]:
    """Return the launchers that installed packages register.

    Raises ConfigurationError when an entry point is not a Launcher.
    """
    rows: list[Launcher] = []
    for point in importlib.metadata.entry_points(group=_GROUP):
        loaded = point.load()
        for row in loaded if isinstance(loaded, tuple) else (loaded,):
            if not isinstance(row, Launcher):
                raise ConfigurationError(
                    f"`{point.name}` of the entry points {_GROUP!r} must be a dualdist.launch.Launcher or a tuple of "
                    f"them, but is {type(row).__name__} instead. Correct or uninstall {point.value}."
                )
            rows.append(row)
    return tuple(rows)
