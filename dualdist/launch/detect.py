"""Launch detection: a pure function from the environment to this process's rank and world size.

One launcher can start another (a Slurm step that runs torchrun), so an environment may hold the variables of several.
The innermost launcher wins: the one that may run inside all others that report another rank or size. See launchers.py.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from types import MappingProxyType

from ..errors import ConfigurationError
from ..types import Launch
from .launchers import LAUNCHERS, Launcher

__all__ = ("detect",)

_OF_LARGER_WORLDS = ("RANK", "SLURM_NTASKS")
"""Variables that suggest a larger world, but without others start no process."""


def detect(env: Mapping[str, str]) -> Launch:
    """Return this process's place in the world according to `env`. Plain python is a world of one.

    An incomplete set of variables (SLURM_* outside a step, RANK without WORLD_SIZE) does not count as a launcher.
    Raises ConfigurationError when a launcher's variables are not numbers or contradict each other, and when two
    launchers disagree although neither can have started the other.
    """
    rows = [row for row in LAUNCHERS if _is_marked(row, env)]
    launches = [_read(row, env) for row in rows]
    if not launches:
        return _plain_python(env)
    conflicts = []
    for row, launch in zip(rows, launches, strict=True):
        allowed = (launch.launcher, *row.inside)
        disagreeing = [
            other for other in launches if other.launcher not in allowed and not _agree(other, launch)
        ]
        if not disagreeing:
            return _located(launch, row, env)
        conflicts += disagreeing
    one, other = launches[0], conflicts[0]
    raise ConfigurationError(
        f"Rank and size must be the same from every launcher, but are {one.describe('rank')} and "
        f"{one.describe('size')} of {one.launcher}, and {other.describe('rank')} and {other.describe('size')} of "
        f"{other.launcher} instead. Unset the variables of the launcher that did not start this process."
    )


def _is_marked(row: Launcher, env: Mapping[str, str]) -> bool:
    """Return whether `env` has a marker of the launcher."""
    if row.name == "env":
        # torchrun sets the same variables.
        return bool(env.get("RANK") and env.get("WORLD_SIZE")) and not env.get("TORCHELASTIC_RUN_ID")
    return any(_is_set(env, marker) for marker in row.markers) and not _are_copies(row, env)


def _is_set(env: Mapping[str, str], marker: str) -> bool:
    name, _, value = marker.partition("=")
    return bool(env.get(name)) and value in ("", env[name])


def _agree(one: Launch, other: Launch) -> bool:
    return (one.rank, one.size) == (other.rank, other.size)


def _are_copies(launcher: Launcher, env: Mapping[str, str]) -> bool:
    """Return whether dualdist.compat, not horovodrun, has set horovodrun's variables.

    compat sets them for scripts under every launcher. A horovodrun that such a script starts sets its own, and the
    address of its rendezvous server with them.
    """
    copied = launcher.rank == "HOROVOD_RANK" and bool(env.get("DUALDIST_COMPAT"))
    return copied and not env.get("HOROVOD_GLOO_RENDEZVOUS_ADDR")


def _read(launcher: Launcher, env: Mapping[str, str]) -> Launch:
    names = {field: getattr(launcher, field) for field in ("rank", "size", "local_rank", "local_size")}
    values = {field: _number(env, name, launcher) for field, name in names.items()}
    rank, size = values["rank"], values["size"]
    if rank is None or size is None:
        missing, present = names["rank"], [name for name in launcher.markers if env.get(name)]
        if rank is not None:
            missing = names["size"]
        raise ConfigurationError(
            f"`{missing}` must be set beside {present[0]}, but is absent. "
            f"Set both for every process, or unset {present[0]} to run a single process."
        )
    if not 0 <= rank < size:
        raise ConfigurationError(
            f"`{names['rank']}` must be at least 0 and less than {names['size']}={size}, but is {rank} instead. "
            "Give every process its own rank."
        )
    return Launch(
        launcher.name,
        rank,
        size,
        values["local_rank"],
        values["local_size"],
        MappingProxyType(names),
        elastic=any(_is_set(env, marker) for marker in launcher.elastic),
        restarts=any(env.get(name, "") not in ("", "0") for name in launcher.restarts),
        starts_mpi=any(env.get(name) for name in launcher.starts_mpi),
        starts_horovod=launcher.starts_horovod,
    )


def _located(launch: Launch, launcher: Launcher, env: Mapping[str, str]) -> Launch:
    """Return `launch` with the address where its processes meet, if the environment names it."""
    if env.get("MASTER_ADDR") and env.get("MASTER_PORT"):
        return dataclasses.replace(launch, init_method="env://")
    if launcher.init_method == "env://" and launch.size > 1:
        raise ConfigurationError(
            f"`MASTER_ADDR` and `MASTER_PORT` must be set beside {launcher.size}={launch.size}, but are absent. "
            "Set both to the address of rank 0, or start with torchrun."
        )
    return dataclasses.replace(launch, init_method=launcher.init_method)


def _plain_python(env: Mapping[str, str]) -> Launch:
    """Return a world of one. Raises ConfigurationError when `env` gives the size of a larger world, but no rank."""
    size = env.get("WORLD_SIZE", "")
    if size not in ("", "0", "1"):
        raise ConfigurationError(
            f"`RANK` must be set beside WORLD_SIZE={size}, but is absent. "
            "Set both for every process, or unset WORLD_SIZE to run a single process."
        )
    # Kubeflow Trainer sets PET_NNODES for torchrun alone.
    if env.get("PET_NNODES", "") not in ("", "1"):
        raise ConfigurationError(
            f"`torchrun` must be the command where PET_NNODES={env['PET_NNODES']} is set, but is absent. "
            "Start the script with torchrun, which reads PET_*, or unset it to run a single process."
        )
    ignored = tuple(
        f"{name}={env[name]}" for name in _OF_LARGER_WORLDS if env.get(name, "") not in ("", "0", "1")
    )
    sources = MappingProxyType({"rank": "plain python", "size": "plain python"})
    return Launch("python", sources=sources, by_launcher=False, ignored=ignored)


def _number(env: Mapping[str, str], name: str, launcher: Launcher) -> int | None:
    """Return the number in the variable `name`, None when it has none."""
    text = env.get(name, "")
    if launcher.node is not None and name == launcher.local_size:
        text = _of_node(text, env.get(launcher.node, ""))
    if not text:
        return None
    if text.isdecimal():
        return int(text)
    raise ConfigurationError(
        f"`{name}` must be a whole number, but is {text!r} instead. "
        f"It is set by {launcher.name}; look at what overwrites it."
    )


def _of_node(text: str, node: str) -> str:
    """Return node number `node`'s entry in Slurm's list of sizes, such as 4(x2),3.

    '' when the list does not give it: then the backend counts after init.
    """
    sizes: list[str] = []
    for entry in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", entry)
        if match is None:
            return text
        sizes += [match[1]] * int(match[2] or 1)
    if len(set(sizes)) == 1:
        return sizes[0]
    return sizes[int(node)] if node.isdecimal() and int(node) < len(sizes) else ""
