"""From a public call to a line of collectives: check the arguments here, then run or queue."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, ParamSpec, TypeVar

import torch

from ..agreement.call import Call
from ..agreement.call_site import call_site
from ..agreement.channel import Channel, Execute
from ..agreement.kinds import Kind
from ..world.context import current
from ..world.process_sets import ProcessSet, channel_of

__all__ = ("Plan", "check_root", "check_tensor", "describe", "differentiable", "make_call", "planned")

T = TypeVar("T")
U = TypeVar("U")
P = ParamSpec("P")


@dataclass(frozen=True)
class Plan(Generic[T]):
    """A collective whose arguments are right on this rank."""

    channel: Channel
    call: Call
    execute: Execute[T]

    def run(self) -> T:
        """Carry it out now."""
        return self.channel.run(self.call, self.execute)

    def submit(self) -> int:
        """Queue it and return a handle."""
        return current().handles.add(self.channel.submit(self.call, self.execute), self.call.name)

    def then(self, change: Callable[[T], U]) -> Plan[U]:
        """Return the plan whose result is `change` of this one's."""
        return Plan(self.channel, self.call, lambda group, verdict: change(self.execute(group, verdict)))


def planned(kind: Kind) -> Callable[[Callable[P, Plan[T]]], Callable[P, Plan[T]]]:
    """Decorate a function that makes a Plan of `kind`: when it raises, the other ranks get an error and do not wait."""

    def decorate(make: Callable[P, Plan[T]]) -> Callable[P, Plan[T]]:
        @functools.wraps(make)
        def wrapper(*args: P.args, **kwargs: P.kwargs) -> Plan[T]:
            try:
                return make(*args, **kwargs)
            except Exception as error:
                # Not initialised, or not a member: then there is no channel to report the error on.
                with contextlib.suppress(TypeError, ValueError):
                    channel_of(kwargs["process_set"]).fail(kind, error)  # type: ignore[arg-type]
                raise

        return wrapper

    return decorate


def make_call(
    kind: Kind,
    name: str | None,
    count: int = 0,
    payload: bytes = b"",
    **arguments: Any,
) -> Call:
    """Return the Call of the user's line for `kind`; `arguments` must be equal on all members.

    Raises ValueError when an asynchronous call of the same name is still outstanding, as Horovod does.
    """
    if name is not None and current().handles.is_outstanding(name):
        raise ValueError(
            f"`name` must not be in use, but {name!r} names a collective that is still outstanding."
        )
    return Call(kind, tuple(arguments.items()), name, call_site(), count, payload=payload)


def check_tensor(tensor: Any, what: str = "tensor") -> None:
    """Raise TypeError or ValueError unless `tensor` is a dense tensor that can be sent."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"`{what}` must be a torch.Tensor, but is a {type(tensor).__name__} instead.")
    if tensor.layout is not torch.strided:
        raise ValueError(
            f"`{what}` must be dense, but is {tensor.layout} instead. Use sparse_allreduce_async, or to_dense()."
        )
    if tensor.is_quantized or tensor.device.type == "meta":
        raise ValueError(
            f"`{what}` must hold plain numbers, but is {tensor.dtype} on {tensor.device} instead."
        )


def check_root(root_rank: int, process_set: ProcessSet) -> int:
    """Return the place of the global rank `root_rank` in the set. Raises ValueError when it is not a member."""
    ranks = channel_of(process_set).group.ranks
    if root_rank not in ranks:
        raise ValueError(f"`root_rank` must be one of the ranks {list(ranks)}, but is {root_rank} instead.")
    return ranks.index(root_rank)


def differentiable(tensors: Sequence[Any]) -> bool:
    """Return whether autograd wants to know of a function of `tensors`."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def describe(tensor: torch.Tensor, shape: tuple[int, ...] | None = None) -> dict[str, Any]:
    """Return what must be equal on all ranks for `tensor`: shape (or the given one), dtype and kind of device."""
    return {
        "shape": tuple(tensor.shape) if shape is None else shape,
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "device": tensor.device.type,
    }
