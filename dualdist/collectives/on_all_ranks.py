"""One outcome for all ranks: if a function fails on some ranks, all ranks raise an exception."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from ..checks import text_of
from ..errors import HorovodInternalError
from ..world.process_sets import ProcessSet, global_process_set
from .objects import allgather_object

__all__ = ("on_all_ranks", "unpickled_on_all_ranks")

T = TypeVar("T")


def on_all_ranks(
    function: Callable[[], T], error: type[Exception], process_set: ProcessSet = global_process_set
) -> list[T]:
    """Run `function` on every rank, and return all results in rank order.

    Collective: every member of `process_set` must call it. Where `function` calls a collective, it
    must do so on every rank, whatever fails. The results are sent by pickle, so they must be small. When it raises on
    some ranks, each of them raises its own exception, and the others raise `error`, which names the first of these
    ranks and quotes its exception.
    """
    result: T | None = None
    failure: Exception | None = None
    try:
        result = function()
    except Exception as raised:
        failure = raised
    problem = None if failure is None else f"{type(failure).__name__}: {text_of(failure)}"
    try:
        outcomes = allgather_object((result, problem), process_set=process_set)
    except HorovodInternalError as broken:
        raise failure or broken from None
    if failure is not None:
        raise failure
    failed = [
        (rank, problem)
        for rank, (_, problem) in zip(process_set.ranks or (), outcomes, strict=True)
        if problem is not None
    ]
    if failed:
        rank, problem = failed[0]
        others = f" (and {len(failed) - 1} more ranks)" if len(failed) > 1 else ""
        raise error(f"Rank {rank}{others} failed: {problem}")
    return [result for result, _ in outcomes]


def unpickled_on_all_ranks(collective: Callable[[], T], process_set: ProcessSet = global_process_set) -> T:
    """Return `collective()`, such as a broadcast_object, which runs user code (unpickling) after all data has arrived.

    Collective over `process_set`. If that code raises on some ranks, the others raise RuntimeError, because they cannot
    continue without those ranks.
    """
    received: list[T] = []
    on_all_ranks(lambda: received.append(collective()), RuntimeError, process_set)
    return received[0]
