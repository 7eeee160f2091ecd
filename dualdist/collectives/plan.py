"""A plan: a collective whose arguments are checked on this rank, ready to run or to queue."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, ParamSpec, TypeVar

import torch
from torch.utils._pytree import tree_leaves

from .. import accelerator
from ..agreement.call import Call, call_site, warn_deprecated
from ..agreement.call_kinds import Kind
from ..agreement.channel import Channel, Execute, Result
from ..agreement.verdict import Verdict
from ..backends.base import Group
from ..checks import integer, is_dtensor, items, number, reduce_op, text, wrong
from ..types import REDUCE_OP_NAMES, Adasum, Average, Op, Sum
from ..world.context import current
from ..world.process_sets import ProcessSet, channel_of, report, reporting
from .reduction import Reduction, check_adasum_size
from .wire import check_reducible

# Orders collectives on a device with the work of the thread that calls them.
#
# Streams are a property of a thread. The worker thread of a channel has other streams than the caller, so that without
# this a collective could read its input before the caller's kernels have written it.

T = TypeVar("T")


class _OwnStreams(threading.local):
    def __init__(self) -> None:
        self._of: dict[torch.device, torch.Stream] = {}

    def on(self, device: torch.device) -> torch.Stream:
        """Return the stream of this thread for asynchronous calls on `device`."""
        if device not in self._of:
            self._of[device] = accelerator.new_stream(device)
        return self._of[device]


_own = _OwnStreams()


def _devices(tensors: Sequence[torch.Tensor]) -> list[torch.device]:
    found = [tensor.device for tensor in tensors if accelerator.has_streams(tensor)]
    return sorted(set(found), key=str) if found else found


def on_streams_of_caller(execute: Execute[T], tensors: Sequence[torch.Tensor]) -> Execute[T]:
    """Return `execute` for a synchronous call: on the caller's streams, also in another thread.

    The caller waits, so that its streams get no other work meanwhile. tensors: what `execute` reads and writes.
    """
    devices = _devices(tensors)
    streams = (
        [stream for device in devices if (stream := accelerator.current_stream(device))] if devices else ()
    )
    if not streams:
        return execute
    caller = threading.get_ident()

    def execute_there(group: Group, verdict: Verdict) -> T:
        if threading.get_ident() == caller:
            return execute(group, verdict)
        with contextlib.ExitStack() as stack:
            for stream in streams:
                stack.enter_context(accelerator.use_stream(stream))
            return execute(group, verdict)

    return execute_there


class Streamed(Generic[T]):
    """An asynchronous call on streams of its own: after what the caller's streams had to do when it was submitted."""

    def __init__(self, execute: Execute[T], tensors: Sequence[torch.Tensor]) -> None:
        self._execute: Execute[T] | None = execute
        self._tensors = tensors
        self._before = {device: accelerator.record_event(device) for device in _devices(tensors)}
        self._after: dict[torch.device, torch.Event] = {}

    def execute(self, group: Group, verdict: Verdict) -> T:
        """Run the call in the thread of the channel."""
        execute, tensors = self._execute, self._tensors
        self._execute, self._tensors = None, ()  # the result may be kept longer than these
        assert execute is not None
        with contextlib.ExitStack() as stack:
            for device, event in self._before.items():
                stream = _own.on(device)
                stack.enter_context(accelerator.use_stream(stream))
                accelerator.wait_event(device, event)
                for tensor in tensors:
                    if tensor.device == device:
                        accelerator.keep_until_done(tensor, stream)
            result = execute(group, verdict)
            self._after = {device: accelerator.record_event(device) for device in self._before}
        return result

    def has_ended(self) -> bool:
        """Return whether the devices have done the call, once `execute` has returned. Does not wait."""
        return all(event.query() for event in self._after.values())

    def order_before_caller(self, result: Any) -> None:
        """Make the current streams of this thread wait for the call, which has returned `result`."""
        for device, event in self._after.items():
            accelerator.wait_event(device, event)
        for leaf in tree_leaves(result):
            stream = accelerator.current_stream(leaf.device) if isinstance(leaf, torch.Tensor) else None
            if stream is not None and leaf.device in self._after:
                accelerator.keep_until_done(leaf, stream)


class StreamedResult(Result[T]):
    """The result of a call that runs on streams of its own."""

    def __init__(self, result: Result[T], streamed: Streamed[T]) -> None:
        self._result, self._streamed = result, streamed

    def done(self) -> bool:
        return self._result.done() and self._streamed.has_ended()

    def get(self) -> T:
        value = self._result.get()
        self._streamed.order_before_caller(value)
        return value


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


def record(
    function: type[torch.autograd.Function],
    plan: Plan[T],
    tensors: Sequence[torch.Tensor],
    process_set: ProcessSet,
    *gradient: int,
) -> T:
    """Run `plan`, a collective of `tensors`, and return its result; record `function` if autograd is active.

    gradient: for a `function` that takes it: Average, Horovod's gradient, or Sum, that of the sum of all ranks' losses.
    """
    for chosen in gradient:
        if type(chosen) is not int or chosen not in (Average, Sum):
            with reporting(plan.call.kind, process_set):
                fix = "Pass hvd.Sum for the gradient of the sum of all ranks' losses."
                raise wrong("gradient", "hvd.Average or hvd.Sum", chosen, fix)
    if not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)):
        return plan.run()
    result: T = function.apply(plan, process_set, *gradient, *tensors)
    return result


def root_of(plan: Plan[Any]) -> int:
    """Return the root_rank of the call of `plan`."""
    root_rank: int = dict(plan.call.arguments)["root_rank"]
    return root_rank


# The arguments of collectives: checks on this rank, and descriptions that must be equal on all ranks.


@functools.cache
def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of `dtype`, such as "float32"."""
    return str(dtype).removeprefix("torch.")


def check_tensor(tensor: Any, what: str = "tensor") -> None:
    """Raise TypeError or ValueError unless `tensor` is a dense tensor that can be sent."""
    if not isinstance(tensor, torch.Tensor):
        raise wrong(what, "a torch.Tensor", tensor, "Convert it with torch.as_tensor().", TypeError)
    if type(tensor) is not torch.Tensor and is_dtensor(tensor):
        raise TypeError(
            f"`{what}` must be a plain tensor, but is a DTensor instead. Pass its to_local() or full_tensor(). Models "
            "that fully_shard or parallelize_module has changed exchange parameters and gradients themselves."
        )
    if tensor.layout is not torch.strided:
        raise ValueError(
            f"`{what}` must be dense, but is {tensor.layout} instead. Use sparse_allreduce_async, or to_dense()."
        )
    if tensor.is_quantized or tensor.is_meta:
        raise ValueError(
            f"`{what}` must hold plain numbers, but is {tensor.dtype} on {tensor.device} instead. "
            "Use dequantize(), or a tensor with data."
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
    for place, tensor in enumerate(given):
        check_tensor(tensor, f"tensors[{place}]")
    return given


def check_rows(tensor: Any, what: str = "tensor") -> None:
    """Raise TypeError or ValueError unless `tensor` can be sent and has rows, (n, ...)."""
    check_tensor(tensor, what)
    if tensor.dim() == 0:
        raise ValueError(
            f"`{what}` must have at least one dimension, but is a number instead. Use reshape(1)."
        )


def check_root(root_rank: Any, process_set: ProcessSet) -> tuple[int, int]:
    """Return the global rank `root_rank` as an int, and its index in the set. Raises ValueError for other ranks."""
    ranks = channel_of(process_set).group.ranks
    rank = integer("root_rank", root_rank, fix="Pass a global rank.")
    if rank not in ranks:
        raise ValueError(
            f"`root_rank` must be one of the ranks {list(ranks)}, but is {rank} instead. Pass a global rank."
        )
    return rank, ranks.index(rank)


def check_splits(tensor: torch.Tensor, splits: Any, size: int) -> list[int]:
    """Return the number of rows for each rank. Raises ValueError unless `splits` fits `size` and `tensor`."""
    rows = tensor.shape[0]
    if splits is None:
        if rows % size:
            raise ValueError(
                f"`tensor` must have rows that divide by {size} ranks, but has {rows} instead. Give `splits`."
            )
        return [rows // size] * size
    if isinstance(splits, torch.Tensor):
        if splits.dtype is not torch.int32 or splits.dim() != 1:
            raise ValueError(
                f"`splits` must be a 1-D int32 tensor, but is {splits.dim()}-D {splits.dtype} instead."
            )
        splits = splits.tolist()
    given = items("splits", splits, "a list of whole numbers", "Give the number of rows for each rank.")
    counts = [integer(f"splits[{place}]", count) for place, count in enumerate(given)]
    if len(counts) != size or min(counts) < 0 or sum(counts) > rows:
        raise ValueError(
            f"`splits` must be {size} numbers of at least 0 with a sum of at most {rows} rows, but is "
            f"{counts} instead. Give the number of rows for each rank."
        )
    return counts


class ReductionArguments(NamedTuple):
    """The arguments that choose a reduction, as the user gave them."""

    op: Op | None
    prescale_factor: float = 1.0
    postscale_factor: float = 1.0
    average: bool | None = None

    def reduction(self, default: int | None = None) -> Reduction:
        """Return the Reduction. default: the op that None means, if it is allowed.

        Raises ValueError or TypeError, and warns as Horovod does (horovod/common/util.py:214).
        """
        op = default if self.op is None else self.op
        if self.average is not None:
            # A string is a name in its place, as in `allreduce(tensor, "loss")`. Horovod averages then, too.
            if not isinstance(self.average, bool | str):  # such as an op in its place
                raise wrong("average", "True, False or None", self.average, "Use `op=` instead.", TypeError)
            if self.op is not None:
                raise ValueError("`average` must not be given together with `op`. Use `op` alone.")
            warn_deprecated("`average` is deprecated; use `op` instead.")
            op = Average if self.average else Sum
        prescale, postscale = self.prescale_factor, self.postscale_factor
        if type(op) is int and type(prescale) is type(postscale) is float and prescale == postscale == 1.0:
            return _unscaled(op)
        return Reduction(
            reduce_op(op),
            number("prescale_factor", prescale),
            number("postscale_factor", postscale),
        )


@functools.cache
def _unscaled(op: int) -> Reduction:
    return Reduction(reduce_op(op))


def check_reduction(tensors: Sequence[torch.Tensor], reduction: Reduction, process_set: ProcessSet) -> None:
    """Raise ValueError or NotImplementedError unless `reduction` can be applied to `tensors`, which can be sent."""
    for tensor in tensors:
        check_reducible(tensor.dtype, reduction.op)
    if len(tensors) > 1 and len({tensor.device for tensor in tensors}) > 1:
        raise ValueError(
            f"`tensors` must be on one device, but are on {sorted({str(t.device) for t in tensors})} instead. "
            "Move them to one."
        )
    if reduction.op == Adasum:
        check_adasum_size(channel_of(process_set).group.size)


def describe_reduction(tensors: Sequence[torch.Tensor], reduction: Reduction) -> dict[str, Any]:
    """Return the arguments of a reduction of `tensors` for its Call, in the order in which errors show them."""
    tensors_of_call = tuple([(tensor.shape, tensor.dtype) for tensor in tensors])
    return _describe_reduction(tensors_of_call, tensors[0].device.type, reduction)


@functools.lru_cache(maxsize=1024)
def _describe_reduction(
    tensors: tuple[tuple[torch.Size, torch.dtype], ...], device: str, reduction: Reduction
) -> dict[str, Any]:
    return {
        "shapes": tuple(tuple(shape) for shape, _ in tensors),
        "dtypes": tuple(dtype_name(dtype) for _, dtype in tensors),
        "op": REDUCE_OP_NAMES[reduction.op],
        "prescale_factor": reduction.prescale_factor,
        "postscale_factor": reduction.postscale_factor,
        "device": device,
    }


def describe_rows(tensor: torch.Tensor) -> dict[str, Any]:
    """Return the arguments for the Call of a collective that moves rows of `tensor`, (n, ...)."""
    return {
        "trailing_shape": tuple(tensor.shape[1:]),
        "dtype": dtype_name(tensor.dtype),
        "device": tensor.device.type,
    }
