"""How to call every public function: with valid arguments, and with one of them replaced."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

import dualdist as hvd

__all__ = ("CASES", "COLLECTIVES", "Case")

Make = Callable[[], Mapping[str, Any]]


@dataclass(frozen=True)
class Case:
    """A public function."""

    function: Callable[..., Any]
    """For its parameters."""
    valid: Make = dict
    """Makes valid arguments: all that are required."""
    call: Callable[..., Any] | None = None
    """What to call, if not the function itself: it waits for asynchronous calls, or makes the object of a method."""

    def run(self, **others: Any) -> Any:
        """Call it with valid arguments, except those in `others`."""
        return (self.call or self.function)(**{**self.valid(), **others})


def finished(function: Callable[..., int]) -> Callable[..., Any]:
    """Return `function` and waiting for its handle."""
    return lambda **arguments: hvd.synchronize(function(**arguments))


def rows() -> torch.Tensor:
    return torch.ones(6)


def one() -> dict[str, Any]:
    return {"tensor": rows()}


def two() -> dict[str, Any]:
    return {"tensors": [rows(), rows()]}


def rooted() -> dict[str, Any]:
    return {"tensor": rows(), "root_rank": 0}


def sparse() -> dict[str, Any]:
    return {"tensor": rows().to_sparse(), "name": None, "op": hvd.Sum}


COLLECTIVES: dict[str, Case] = {
    **{
        name: Case(getattr(hvd, name), one)
        for name in ("allreduce", "allreduce_", "allgather", "alltoall", "reducescatter")
    },
    **{
        name: Case(getattr(hvd, name), one, finished(getattr(hvd, name)))
        for name in (
            "allreduce_async",
            "allreduce_async_",
            "allgather_async",
            "alltoall_async",
            "reducescatter_async",
        )
    },
    **{
        name: Case(getattr(hvd, name), two)
        for name in ("grouped_allreduce", "grouped_allreduce_", "grouped_allgather", "grouped_reducescatter")
    },
    **{
        name: Case(getattr(hvd, name), two, finished(getattr(hvd, name)))
        for name in (
            "grouped_allreduce_async",
            "grouped_allreduce_async_",
            "grouped_allgather_async",
            "grouped_reducescatter_async",
        )
    },
    **{
        name: Case(getattr(hvd, name), rooted)
        for name in ("broadcast", "broadcast_", "reduce", "gather", "scatter")
    },
    **{
        name: Case(getattr(hvd, name), rooted, finished(getattr(hvd, name)))
        for name in ("broadcast_async", "broadcast_async_")
    },
    "sparse_allreduce_async": Case(
        hvd.sparse_allreduce_async, sparse, lambda **arguments: hvd.sparse_allreduce_async(**arguments)()
    ),
    **{
        name: Case(getattr(hvd, name), lambda: {"obj": 1})
        for name in ("broadcast_object", "allgather_object", "gather_object")
    },
    "scatter_object": Case(hvd.scatter_object, lambda: {"objs": [1] * hvd.size()}),
    "barrier": Case(hvd.barrier),
}

CASES: dict[str, Case] = {
    **COLLECTIVES,
    "join": Case(hvd.join),
    "poll": Case(hvd.poll),
    "synchronize": Case(hvd.synchronize),
}
