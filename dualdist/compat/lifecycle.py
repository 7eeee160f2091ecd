"""`init` for Horovod scripts: it also sets Horovod's environment variables."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any, ParamSpec

import dualdist

from ..world.context import current
from .environment import export_world

__all__ = ("HorovodBasics", "init")

P = ParamSpec("P")


def _exporting(join: Callable[P, None]) -> Callable[P, None]:
    @functools.wraps(join)
    def init(*args: P.args, **kwargs: P.kwargs) -> None:
        join(*args, **kwargs)
        export_world(current().world, os.environ)

    return init


init = _exporting(dualdist.init)


class HorovodBasics:
    """The same functions as methods, as in horovod/common/basics.py. Its arguments name a library and are ignored."""

    def __init__(self, pkg_path: str, *args: str) -> None:
        self.init = init

    def __getattr__(self, name: str) -> Any:
        return getattr(dualdist, name)
