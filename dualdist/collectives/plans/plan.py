"""A plan: a collective whose arguments are checked on this rank, ready to run or to queue."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, ParamSpec, TypeVar

import torch

from ...agreement.call import Call
from ...agreement.call_kinds import Kind
from ...agreement.call_site import call_site
from ...agreement.channel import Channel, Execute
from ...checks import text
from ...world.context import current
from ...world.process_sets import report
from .streams import Streamed, StreamedResult, on_streams_of_caller

__all__ = ("Plan", "make_call", "planned")

T = TypeVar("T")
U = TypeVar("U")
P = ParamSpec("P")


@dataclass(frozen=True)
class Plan(Generic[T]):
    """A collective whose arguments are right on this rank."""

    channel: Channel
    call: Call
    execute: Execute[T]
    tensors: Sequence[torch.Tensor] = ()
    """What `execute` reads and writes."""

    def __post_init__(self) -> None:
        """Raise ValueError if an asynchronous call of the same kind and name is not finished, as Horovod does."""
        if self.call.name is not None and self.channel.is_outstanding(self.call):
            raise ValueError(
                f"`name` must not be in use, but {self.call.name!r} names a collective that is still outstanding. Call "
                "synchronize() first, or choose another name."
            )

    def run(self) -> T:
        """Agree with the other members, then run the collective. Collective over the process set."""
        execute = on_streams_of_caller(self.execute, self.tensors) if self.tensors else self.execute
        return self.channel.run(self.call, execute)

    def submit(self) -> int:
        """Queue the collective and return a handle."""
        streamed = Streamed(self.execute, self.tensors)
        result = self.channel.submit(self.call, streamed.execute)
        return current().handles.add(StreamedResult(result, streamed))

    def then(self, change: Callable[[T], U]) -> Plan[U]:
        """Return the plan with the result `change(result of this plan)`."""
        return Plan(
            self.channel, self.call, lambda group, verdict: change(self.execute(group, verdict)), self.tensors
        )


def planned(kind: Kind) -> Callable[[Callable[P, Plan[T]]], Callable[P, Plan[T]]]:
    """Decorate a function that makes a Plan of `kind`: if it raises, the other ranks get an error and do not wait."""

    def decorate(make: Callable[P, Plan[T]]) -> Callable[P, Plan[T]]:
        @functools.wraps(make)
        def wrapper(*args: P.args, **kwargs: P.kwargs) -> Plan[T]:
            # `reporting` does the same, but this must be fast.
            try:
                return make(*args, **kwargs)
            except Exception as error:
                report(kind, kwargs["process_set"], error)
                raise

        return wrapper

    return decorate


def make_call(kind: Kind, name: str | None, count: int = 0, payload: bytes = b"", **arguments: Any) -> Call:
    """Return the Call of `kind` by the user's line; `arguments` must be equal on all members."""
    if name is not None:
        name = str.__str__(text("name", name, "Pass a string or None."))  # of no class of the user
    return Call(kind, tuple(arguments.items()), name, call_site(), count, payload=payload)
