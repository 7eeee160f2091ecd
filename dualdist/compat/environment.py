"""HOROVOD_RANK and similar variables, which horovodrun sets and scripts read, set under every launcher.

They are recorded as copies. Otherwise launch detection would conclude that horovodrun started the process, and Horovod
itself would use them.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import MutableMapping

from ..errors import ConfigurationError
from ..launch import detect
from ..launch.copies import add_copies
from ..types import World

__all__ = ("export_launch", "export_world")

_OVER_GLOO = {"HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo"}
"""As horovodrun sets them (horovod/runner/gloo_run.py:205). With MPI it does not."""


def export_launch(env: MutableMapping[str, str]) -> None:
    """Set what the launcher provides, before `init()`. `export_world` sets the other numbers after it."""
    with contextlib.suppress(ConfigurationError):  # init() raises it again
        launch = detect(env)
        fixed = {"HOROVOD_HOSTNAME": socket.gethostname()} | ({} if launch.starts_mpi else _OVER_GLOO)
        add_copies({name: value for name, value in fixed.items() if name not in env}, env)
        if launch.size in (1, launch.local_size):
            export_world(World(launch.rank, launch.size, launch.rank, launch.size, 0, 1), env)
        else:
            names = ("rank", "size", "local_rank", "local_size")
            _export({name: getattr(launch, name) for name in names}, env)


def export_world(world: World, env: MutableMapping[str, str]) -> None:
    """Set the six numbers of `world`."""
    _export({name: getattr(world, name) for name in World.__dataclass_fields__}, env)


def _export(numbers: dict[str, int | None], env: MutableMapping[str, str]) -> None:
    known = {name: str(number) for name, number in numbers.items() if number is not None}
    add_copies({f"HOROVOD_{name.upper()}": text for name, text in known.items()}, env)
