"""A plan: a collective whose arguments are checked on this rank, ready to run or to queue, with a handle."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch.autograd.forward_ad import unpack_dual

from .. import needed
from ..agreement.call import Call, Kind, call_site
from ..agreement.channel import Channel
from ..agreement.connections import Execute, Verdict
from ..backends.base import Group
from ..checks import integer, is_dtensor, items, text, wrong
from ..compiling import not_compiled
from ..types import Average, Sum
from ..world import ProcessSetLike, channel_of, current, report, reporting

T = TypeVar("T")
P = ParamSpec("P")


@dataclass(frozen=True)
class Plan(Generic[T]):
    """A collective whose arguments are right on this rank."""

    process_set: ProcessSetLike
    channel: Channel
    call: Call
    execute: Execute[T]
    tensors: Sequence[torch.Tensor] = ()
    """What `execute` reads and writes."""
    restore: Callable[[Any], Any] | None = None
    """Changes the result in ways that autograd records, such as decompression."""
    needs_tensors: bool = False
    """Whether the gradient is computed from `tensors`."""

    def run(self, gradient_of: GradientOf | None = None, *gradient: int) -> T:
        """Agree with the other members, then run the collective. Collective over the process set.

        Args:
            gradient_of: computes the gradient, if autograd is active. None: it is not recorded.
            gradient: for a function that takes it. Average: the gradient as in Horovod. Sum: that of the sum of all
                ranks' losses.
        """
        for chosen in gradient:
            if type(chosen) is not int or chosen not in (Average, Sum):
                with reporting(self.call.kind, self.process_set):
                    fix = "Pass hvd.Sum for the gradient of the sum of all ranks' losses."
                    raise wrong("gradient", "hvd.Average or hvd.Sum", chosen, fix)
        is_recorded = gradient_of is not None and torch.is_grad_enabled()
        if is_recorded and any([tensor.requires_grad for tensor in self.tensors]):
            result: T = _Recorded.apply(self, gradient_of, gradient, *self.tensors)
        else:
            execute = self.execute
            if not all([tensor.is_cpu for tensor in self.tensors]):
                execute = needed("streams").on_streams_of_caller(execute, self.tensors)
            result = self.channel.run(self.call, execute)
        return result if gradient_of is None or self.restore is None else self.restore(result)

    def submit(self, change: Callable[[T], Any] = lambda result: result) -> int:
        """Queue the collective and return a handle. change: makes what `synchronize` returns of the result."""

        def execute(group: Group, verdict: Verdict) -> Any:
            return change(self.execute(group, verdict))

        if not all([tensor.is_cpu for tensor in self.tensors]):
            return new_handle(needed("streams").Started(self.channel, self.call, execute, self.tensors))
        return new_handle(self.channel.submit(self.call, execute))


GradientOf = Callable[..., Sequence[torch.Tensor]]
"""gradient_of(ran, *grads) returns the gradients of a plan's tensors, from those of its result. ran: see _Recorded."""


@not_compiled
class _Recorded(torch.autograd.Function):
    """A collective whose gradient autograd records."""

    @staticmethod
    def forward(ctx: Any, plan: Plan[T], gradient_of: GradientOf, gradient: Sequence[int], *tensors: torch.Tensor) -> T:
        result: Any = plan.run()
        ctx.gradient_of, ctx.gradient = gradient_of, gradient[0] if gradient else None
        ctx.call, ctx.process_set = replace(plan.call, payload=b""), plan.process_set
        ctx.shapes = [tensor.shape for tensor in tensors]
        ctx.numbers = result[-1] if isinstance(result, tuple) and isinstance(result[-1], list) else None
        if plan.needs_tensors:
            ctx.save_for_backward(*tensors)
        return result  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return None, None, None, *ctx.gradient_of(ctx, *grads)


def planned(kind: Kind) -> Callable[[Callable[P, Plan[T]]], Callable[P, Plan[T]]]:
    """Decorate a function that makes a Plan of `kind`: if it raises, so do other ranks' calls from its line."""

    def decorate(make: Callable[P, Plan[T]]) -> Callable[P, Plan[T]]:
        @functools.wraps(make)
        def wrapper(*args: P.args, **kwargs: P.kwargs) -> Plan[T]:
            try:
                refuse_fake_tensor_mode()  # before the checks of arguments, which may fail in another way
                plan = make(*args, **kwargs)
                if plan.call.name is not None and plan.channel.is_outstanding(plan.call):  # as in Horovod
                    raise ValueError(
                        f"`name` must not be in use, but {plan.call.name!r} names a collective that is still "
                        "outstanding. Call synchronize() first, or choose another name."
                    )
                return plan
            except Exception as error:  # a block of `reporting` would take longer
                report(kind, kwargs["process_set"], error)
                raise

        return wrapper

    return decorate


def refuse_fake_tensor_mode() -> None:
    """Raise ValueError inside FakeTensorMode, where the result of a collective would be lost."""
    if type(torch.Tensor()) is not torch.Tensor:
        raise ValueError("`FakeTensorMode` must not be active in a collective, but is. Leave it.")


def make_call(kind: Kind, name: str | None, count: int = 0, payload: bytes = b"", **arguments: Any) -> Call:
    """Return the Call of `kind` by the user's line; `arguments` must be equal on all members."""
    if name is not None:
        name = str.__str__(text("name", name, "Pass a string or None."))  # of no class of the user
    return Call(kind, tuple(arguments.items()), name, call_site(), count, payload=payload)


def root_of(plan: Any) -> int:
    """Return the root_rank of the call of `plan`, or of one that has run (see GradientOf)."""
    root_rank: int = dict(plan.call.arguments)["root_rank"]
    return root_rank


# The handles of asynchronous collectives, which are plain integers as in Horovod.

_handles = itertools.count()


def new_handle(started: Any) -> int:
    """Return a new handle for `started`, a Request of a channel, or on devices what has its `ended` and `get`."""
    handle = next(_handles)
    current().handles[handle] = started
    return handle


@not_compiled
def poll(handle: int) -> bool:
    """Return whether `synchronize(handle)` would return at once. Local.

    Raises ValueError for a handle that is unknown or already synchronized.
    """
    started = current().handles.get(_checked_handle(handle))
    if started is None:
        raise ValueError(
            f"`handle` must be outstanding, but {handle} is unknown or was synchronized already. Pass what an "
            "asynchronous call has returned."
        )
    return bool(started.ended)


@not_compiled
def synchronize(handle: int) -> Any:
    """Wait for an asynchronous collective and return its result. Local.

    Returns None for a handle that is unknown or already synchronized. Raises HorovodInternalError if it failed.
    """
    started = current().handles.pop(_checked_handle(handle), None)
    return None if started is None else started.get()


def _checked_handle(handle: Any) -> int:
    return integer("handle", handle, fix="Pass what an asynchronous call has returned.")


# The arguments of collectives: checks on this rank, and descriptions that must be equal on all ranks.


def check_tensor(tensor: Any, what: str = "tensor") -> None:
    """Raise TypeError or ValueError unless `tensor` is a dense tensor that can be sent."""
    if not isinstance(tensor, torch.Tensor):
        raise wrong(what, "a torch.Tensor", tensor, "Convert it with torch.as_tensor().", TypeError)
    if type(tensor) is not torch.Tensor and is_dtensor(tensor):
        raise TypeError(
            f"`{what}` must be a plain tensor, but is a DTensor instead. Pass its to_local() or full_tensor(). Call "
            "broadcast_parameters() before fully_shard or parallelize_module changes the model, which then exchanges "
            "parameters and gradients itself."
        )
    if tensor.is_nested:
        raise ValueError(f"`{what}` must be dense, but is a nested tensor instead. Pass its unbind() or values().")
    if tensor.layout is not torch.strided:
        raise ValueError(
            f"`{what}` must be dense, but is {tensor.layout} instead. Use sparse_allreduce_async, or to_dense()."
        )
    if tensor.is_quantized or tensor.is_meta:
        raise ValueError(
            f"`{what}` must hold plain numbers, but is {tensor.dtype} on {tensor.device} instead. "
            "Use dequantize(), or a tensor with data."
        )
    try:
        has_memory = type(tensor) is not torch.Tensor or tensor.data_ptr() != 0 or tensor.numel() == 0
        has_memory &= type(tensor).__name__ != "FakeTensor"
    except RuntimeError:
        has_memory = False
    if not has_memory:
        raise ValueError(
            f"`{what}` must have memory, but has none, as inside torch.func.grad, vmap, jvp, functionalize or "
            "FakeTensorMode. Call the collective outside of the transformed function."
        )
    if unpack_dual(tensor).tangent is not None:
        raise ValueError(
            f"`{what}` must have no tangent of torch's forward-mode AD, which collectives do not support, but has one. "
            "Use backward(), or pass unpack_dual(tensor).primal."
        )


def check_tensors(tensors: Any, *, grouped: bool) -> list[torch.Tensor]:
    """Return `tensors` as a list. Raise TypeError or ValueError unless all can be sent.

    grouped: whether the user gave the sequence `tensors`, and not a single `tensor`.
    """
    if not grouped:
        check_tensor(tensors[0])
        return list(tensors)
    rule, fix = "a list or tuple of tensors", "Use the function without `grouped_` for one."
    if isinstance(tensors, torch.Tensor):
        raise wrong("tensors", rule, tensors, fix, TypeError)
    given = items("tensors", tensors, rule, fix)
    if not given:
        raise ValueError("`tensors` must hold at least one tensor, but is empty instead. Skip the call.")
    devices = {str(tensor.device) for tensor in given if isinstance(tensor, torch.Tensor)}
    if len(devices) > 1:
        raise ValueError(f"`tensors` must be on one device, but are on {sorted(devices)} instead. Move them to one.")
    for place, tensor in enumerate(given):
        check_tensor(tensor, f"tensors[{place}]")
    return given


def check_rows(tensor: Any, what: str = "tensor") -> None:
    """Raise TypeError or ValueError unless `tensor` can be sent and has rows, (n, ...)."""
    check_tensor(tensor, what)
    if tensor.dim() == 0:
        raise ValueError(f"`{what}` must have at least one dimension, but is a number instead. Use reshape(1).")


def channel_and_root(process_set: ProcessSetLike, root_rank: Any) -> tuple[Channel, int, int]:
    """Return the channel of the set, the global rank `root_rank` as an int, and its index in the set.

    Raises ValueError for other ranks, and as channel_of does.
    """
    channel = channel_of(process_set)
    ranks, rank = channel.group.ranks, integer("root_rank", root_rank, fix="Pass a global rank.")
    if rank not in ranks:
        raise wrong("root_rank", f"one of the ranks {list(ranks)}", rank, "Pass a global rank.")
    return channel, rank, ranks.index(rank)
