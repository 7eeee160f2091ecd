"""The environment variables that `dualdist run` and `spawn` give to their processes, here and on other hosts."""

from __future__ import annotations

import re
from collections.abc import Mapping

from ..errors import ConfigurationError
from .copies import COPIES
from .launchers import LAUNCHERS
from .site import NAMED_BY, registered_launchers

__all__ = (
    "HOST_VARIABLES",
    "RENDEZVOUS",
    "exportable",
    "process_variables",
    "secret_in",
    "without_launchers",
)

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
