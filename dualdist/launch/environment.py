"""The environment variables that `dualdist run` and `spawn` give to their processes, here and on other hosts."""

from __future__ import annotations

import functools
import importlib.metadata
import re
from collections.abc import Mapping

from ..errors import ConfigurationError
from .copies import COPIES
from .launchers import DUALDIST_RUN, LAUNCHERS, SITE, SPAWN, Launcher

# Launchers that a site adds to the table: with environment variables, or with a package that registers a row.
#
# A package registers a Launcher, or a tuple of them, as an entry point of the group "dualdist.launchers". It is read
# only where no row of the table describes the process.

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


RENDEZVOUS, _SECRET = "DUALDIST_RENDEZVOUS", "DUALDIST_SECRET"

_NUMBERS = ("rank", "size", "local_rank", "local_size")
_MORE_LAUNCHER_VARIABLES = re.compile(
    r"MASTER_(ADDR|PORT)|TORCHELASTIC_.*|OMPI_.*|PMI.*|SLURM_STEP_.*|DUALDIST_(RENDEZVOUS|SECRET)"
    r"|(GROUP|ROLE)_(RANK|NAME|WORLD_SIZE)"
    r"|HOROVOD_(GLOO_(RENDEZVOUS|IFACE).*|RANK|SIZE|LOCAL_.*|CROSS_.*|HOSTNAME|CONTROLLER|CPU_OPERATIONS|ELASTIC)"
)
"""Variables beside those of the table that a launcher, or dualdist.compat, sets for its own processes."""

HOST_VARIABLES = (
    r"BASH_FUNC_.*|OLDPWD|.*CUDA_VISIBLE_DEVICES|_HOROVOD_SECRET_KEY"  # horovod/runner/common/util/env.py:24
    r"|HOME|USER|LOGNAME|SHELL|MAIL|PWD|SHLVL|_|HOSTNAME|DISPLAY|XAUTHORITY|TMPDIR|SSH_.*|XDG_.*|DBUS_.*"
)
"""A regular expression of variables that are valid only on this host or in this login session."""


def without_launchers(env: Mapping[str, str]) -> dict[str, str]:
    """Return `env` without the variables that launchers have set for this process."""
    rows = (*LAUNCHERS, *registered_launchers())
    known = set(NAMED_BY.values()) | {getattr(row, field) for row in rows for field in _NUMBERS}
    known |= {marker.partition("=")[0] for row in rows for marker in row.markers}
    known.add(COPIES)
    known |= {env[setting] for setting in NAMED_BY.values() if env.get(setting)}
    return {
        name: value
        for name, value in env.items()
        if name not in known and not _MORE_LAUNCHER_VARIABLES.fullmatch(name)
    }


def exportable(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables to send to other hosts: all but those of this host, as horovodrun does."""
    return {name: value for name, value in env.items() if not re.fullmatch(HOST_VARIABLES, name)}


def process_variables(
    launcher: str, rank: int, size: int, local_rank: int, local_size: int, rendezvous: str, secret: bytes
) -> dict[str, str]:
    """Return the variables that give one process its place in the job. detect.py and rendezvous/ read them."""
    return {
        "DUALDIST_LAUNCHER": launcher,
        "DUALDIST_RANK": str(rank),
        "DUALDIST_SIZE": str(size),
        "DUALDIST_LOCAL_RANK": str(local_rank),
        "DUALDIST_LOCAL_SIZE": str(local_size),
        RENDEZVOUS: rendezvous,
        _SECRET: secret.hex(),
    }


def secret_in(env: Mapping[str, str]) -> bytes:
    """Return the job's secret. Raises ConfigurationError when DUALDIST_SECRET is not hexadecimal."""
    try:
        return bytes.fromhex(env.get(_SECRET, ""))
    except ValueError:
        raise ConfigurationError(
            f"`{_SECRET}` must be hexadecimal digits, but is not. Make one with `openssl rand -hex 32`."
        ) from None
