"""A launch that the arguments of `init` describe, alone or on top of what the environment says."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from ..checks import configuration, integer, text, wrong
from ..errors import ConfigurationError
from ..types import Launch
from .detect import detect

__all__ = ("launch_from",)

_ARGUMENTS = {"rank": "rank", "size": "world_size", "init_method": "init_method"}
"""Field of Launch -> argument of `init`."""


def launch_from(
    given: Mapping[str, Any], env: Mapping[str, str], mpi_size: Callable[[], int] | None = None
) -> Launch:
    """Return the launch that `env` describes, with the fields of Launch in `given` in their place (None: not given).

    mpi_size: as in `detect`. With `is_part` in `given`, the world has only some of the launched processes: the local
    numbers and MPI's world are those of another world, and are left out.
    Rank and world size together need no launcher. Raises ConfigurationError when arguments are missing or
    contradict each other.
    """
    is_part = bool(given.get("is_part"))
    given = {field: value for field, value in given.items() if field != "is_part"}
    with configuration():
        given = _checked({field: value for field, value in given.items() if value is not None})
    if not given:
        return detect(env, mpi_size)
    alone = given.keys() >= {"rank", "size"} and not is_part
    detected = Launch("init") if alone else detect(env, mpi_size)
    if detected.launcher == "python" and given.get("init_method") != "env://":
        missing = [name for field, name in _ARGUMENTS.items() if field not in given]
        raise ConfigurationError(
            f"`{missing[0]}` must be given together with {', '.join(_ARGUMENTS[field] for field in given)}, but is "
            "None instead, and no launcher started this process. Give rank, world_size and init_method, or none."
        )
    if not (alone or is_part or "init_method" in given):
        _check_agreement(given, detected)
    sources = dict(detected.sources) | {field: f"init({_ARGUMENTS[field]}=)" for field in given}
    if is_part:
        detected = dataclasses.replace(
            detected,
            local_rank=None,
            local_size=None,
            starts_mpi=False,
            elastic=False,
            restarts=False,
            is_part=True,
        )
    launch = dataclasses.replace(detected, **given, sources=MappingProxyType(sources))
    if launch.size > 1 and launch.init_method is None and alone:
        raise ConfigurationError(
            "`init_method` must be given together with rank and world_size, but is None instead. Use "
            "'tcp://host:port', 'file:///path' or 'env://', as in torch.distributed."
        )
    if not 0 <= launch.rank < launch.size:
        raise ConfigurationError(
            f"`rank` must be at least 0 and less than world_size={launch.size}, but is {launch.rank} instead. "
            "Give every process its own rank."
        )
    return launch


def _check_agreement(given: Mapping[str, Any], detected: Launch) -> None:
    """Raise ConfigurationError if `given` contradicts the launcher: then two processes may have the same rank."""
    for field in ("rank", "size"):
        if field in given and given[field] != getattr(detected, field):
            raise ConfigurationError(
                f"`{_ARGUMENTS[field]}` must be the {detected.describe(field)} that {detected.launcher} has set, but "
                f"is {given[field]} instead. Leave it out, or give rank, world_size and init_method."
            )


def _checked(given: dict[str, Any]) -> dict[str, Any]:
    """Return `given` with integers as int. Raises TypeError or ValueError."""
    if "init_method" in given:
        fix = "Use 'tcp://host:port', 'file:///path' or 'env://', as in torch.distributed."
        method = text("init_method", given["init_method"], fix)
        if not method.startswith(("tcp://", "file://", "env://")):
            raise wrong("init_method", "an address", method, fix)
    least = {"rank": 0, "size": 1}
    numbers = {
        field: integer(_ARGUMENTS[field], given[field], least=least[field])
        for field in least
        if field in given
    }
    return {**given, **numbers}
