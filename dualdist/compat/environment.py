"""HOROVOD_RANK and similar variables, which horovodrun sets and scripts read, set under every launcher.

DUALDIST_COMPAT marks them as copies. Without it, launch detection would conclude that horovodrun started the process.
"""

from __future__ import annotations

import contextlib
from collections.abc import MutableMapping

from ..errors import ConfigurationError
from ..launch import detect
from ..types import World

__all__ = ("MARK", "export_launch", "export_world")

MARK = "DUALDIST_COMPAT"


def export_launch(env: MutableMapping[str, str]) -> None:
    """Set the numbers that the launcher provides, before `init()`. `export_world` sets the others after it."""
    with contextlib.suppress(ConfigurationError):  # init() raises it again
        launch = detect(env)
        if launch.size in (1, launch.local_size):
            export_world(World(launch.rank, launch.size, launch.rank, launch.size, 0, 1), env)
        else:
            names = ("rank", "size", "local_rank", "local_size")
            _export({name: getattr(launch, name) for name in names}, env)


def export_world(world: World, env: MutableMapping[str, str]) -> None:
    """Set the six numbers of `world`."""
    _export({name: getattr(world, name) for name in World.__dataclass_fields__}, env)


def _export(numbers: dict[str, int | None], env: MutableMapping[str, str]) -> None:
    for name, number in numbers.items():
        if number is not None:
            env[f"HOROVOD_{name.upper()}"] = str(number)
