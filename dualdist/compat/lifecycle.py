"""`init` for Horovod scripts: it also sets Horovod's environment variables, and opens no default process group."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec

import dualdist

from ..world.context import Context, current, current_or_inherited
from ..world.process_sets import ProcessSet
from . import export_world

__all__ = ("HorovodBasics", "init")

P = ParamSpec("P")


def _exporting(join: Callable[P, None]) -> Callable[P, None]:
    @functools.wraps(join)
    def init(*args: P.args, **kwargs: P.kwargs) -> None:
        Context.opens_process_group = False  # also when elastic training joins again
        join(*args, **kwargs)
        export_world(current().world, os.environ)

    return init


init = _exporting(dualdist.init)


class HorovodBasics:
    """The same functions as methods, as in horovod/common/basics.py. Its arguments name a library and are ignored."""

    HOROVOD_PROCESS_SET_ERROR_INIT = -1
    HOROVOD_PROCESS_SET_ERROR_DYNAMIC = -2
    HOROVOD_PROCESS_SET_ERROR_UNKNOWN_SET = -3
    HOROVOD_PROCESS_SET_ERROR_FOREIGN_SET = -4
    HOROVOD_PROCESS_SET_ERROR_SHUTDOWN = -5
    HOROVOD_PROCESS_SET_ERROR_EXISTING_SET = -6

    def __init__(self, pkg_path: str, *args: str) -> None:
        self.init = init

    def __getattr__(self, name: str) -> Any:
        try:
            return getattr(dualdist, name)
        except AttributeError:
            raise AttributeError(
                f"HorovodBasics has no {name!r} under dualdist.compat: there is no compiled library of Horovod. "
                "Use the functions of horovod.torch."
            ) from None

    def _get_process_set_ids_and_ranks(self) -> dict[int, list[int]]:
        sets: dict[int, ProcessSet] = current_or_inherited().process_sets
        return {number: list(process_set.ranks or ()) for number, process_set in sets.items()}

    def _process_set_rank(self, process_set_id: int) -> int | None:
        return self._process_set(process_set_id).rank()

    def _process_set_size(self, process_set_id: int) -> int | None:
        return self._process_set(process_set_id).size()

    def _add_process_set_impl(self, ranks: Sequence[int]) -> int | None:
        if sorted(ranks) in self._get_process_set_ids_and_ranks().values():
            return None
        return dualdist.add_process_set(list(ranks)).process_set_id

    def _remove_process_set_impl(self, process_set_id: int) -> int | None:
        found = current_or_inherited().process_sets.get(process_set_id)
        return process_set_id if found is not None and dualdist.remove_process_set(found) else None

    @staticmethod
    def _process_set(process_set_id: int) -> ProcessSet:
        try:
            found: ProcessSet = current_or_inherited().process_sets[process_set_id]
        except KeyError:
            raise ValueError(
                f"`process_set_id` must be registered, but is {process_set_id} instead."
            ) from None
        return found
