"""A site's own launcher, which the user describes by naming its variables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .core.launch.launchers import OUTERMOST, SITE, Launcher
from .errors import ConfigurationError

NAMED_BY = {
    "rank": "DUALDIST_RANK_FROM",
    "size": "DUALDIST_SIZE_FROM",
    "local_rank": "DUALDIST_LOCAL_RANK_FROM",
    "local_size": "DUALDIST_LOCAL_SIZE_FROM",
}
"""Field of Launcher -> the variable that names the variable with this number."""


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
    fields: dict[str, Any] = {**dict.fromkeys(NAMED_BY), **names}
    return Launcher(SITE, markers=(NAMED_BY["rank"],), inside=OUTERMOST, is_command=False, **fields)
