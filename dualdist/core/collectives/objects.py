"""Collectives of Python objects.

If pickling an object fails, its error is raised on that rank, and HorovodInternalError on the other ranks. If
unpickling it fails on a rank, its error is raised there alone. In both cases the next call works.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import io
import pickle
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from ...errors import HorovodInternalError
from ..agreement.call import Kind
from ..agreement.connections import Verdict
from ..backends.base import Group
from ..checks import add_note, text_of
from ..compiling import not_compiled
from ..world import ProcessSetLike, channel_of, global_process_set
from .plan import Plan, channel_and_root, make_call, planned, root_of
from .wire import allgather_rows

# Sent with pickle, or with cloudpickle if it is installed.
#
# The functions unpickle after the collective: unpickling runs code of the objects' classes. If that code raises an
# exception, it must not look like a failure of the collective.

T = TypeVar("T")
ALLGATHER_OBJECT = Kind("allgather_object", "ALLGATHER")
BROADCAST_OBJECT = Kind("broadcast_object", "BROADCAST")
NO_BYTES = torch.empty(0, dtype=torch.uint8, device="cpu")


def compact(tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor`, or a copy if its memory has more than its elements: pickle and torch.save write all of that."""
    if tensor.layout is torch.strided and tensor.untyped_storage().nbytes() <= tensor.nbytes:
        return tensor
    copy = tensor.detach().clone().requires_grad_(tensor.requires_grad)
    copy.__dict__.update(tensor.__dict__)
    return copy


@functools.cache
def _pickler() -> type[pickle.Pickler]:
    """Return a kind of cloudpickle's class if that is installed, as Horovod uses it, else of pickle's."""
    has_cloudpickle = importlib.util.find_spec("cloudpickle") is not None
    base: Any = importlib.import_module("cloudpickle").CloudPickler if has_cloudpickle else pickle.Pickler

    class CompactPickler(base):  # type: ignore[misc]
        def reducer_override(self, obj: Any) -> Any:
            # A parameter is pickled by its `data`, and a wrapper of tensors by these.
            if isinstance(obj, torch.Tensor) and not isinstance(obj, torch.nn.Parameter):
                is_wrapper = type(obj).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
                if not is_wrapper and (own := compact(obj)) is not obj:
                    return own.__reduce_ex__(4)
            return super().reducer_override(obj) if has_cloudpickle else NotImplemented

    return CompactPickler


def dump(obj: Any) -> torch.Tensor:
    """Return `obj` pickled, (n,) uint8."""
    file = io.BytesIO()
    _pickler()(file).dump(obj)
    return torch.frombuffer(bytearray(file.getbuffer()), dtype=torch.uint8)


@planned(BROADCAST_OBJECT)
def _plan_broadcast_object(
    obj: Any, root_rank: int, name: str | None, *, process_set: ProcessSetLike
) -> Plan[torch.Tensor | None]:
    """Return the plan of a broadcast_object. Its result: the received bytes, None on the root."""
    channel, root_rank, root = channel_and_root(process_set, root_rank)
    is_root = channel.group.rank == root
    data = dump(obj) if is_root else NO_BYTES
    call = make_call(BROADCAST_OBJECT, name, count=data.numel(), root_rank=root_rank)

    def execute(group: Group, verdict: Verdict) -> torch.Tensor | None:
        sent = data if is_root else torch.empty(verdict.counts[root], dtype=torch.uint8, device="cpu")
        sent = sent.to(group.wire_device(sent.device))
        group.broadcast_(sent, root).wait()
        return None if is_root else sent

    return Plan(process_set, channel, call, execute)


@not_compiled
def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSetLike = global_process_set
) -> Any:
    """Return rank `root_rank`'s `obj` on every rank: the object itself on the root, a copy elsewhere.

    Collective: every member of `process_set` must call it; `obj` is ignored on the other ranks.
    If pickling fails, its error is raised on the root and HorovodInternalError on the other ranks. If unpickling fails
    on a rank, its error is raised there alone.
    """
    plan = _plan_broadcast_object(obj, root_rank, name, process_set=process_set)
    received = plan.run()
    return obj if received is None else load(received, root_of(plan))


@planned(ALLGATHER_OBJECT)
def _plan_allgather_object(obj: Any, name: str | None, *, process_set: ProcessSetLike) -> Plan[Sequence[torch.Tensor]]:
    """Return the plan of an allgather_object. Its result: the bytes of each rank."""
    channel, data = channel_of(process_set), dump(obj)
    call = make_call(ALLGATHER_OBJECT, name, count=data.numel())

    def execute(group: Group, verdict: Verdict) -> Sequence[torch.Tensor]:
        (gathered,), _ = allgather_rows(group, [data], verdict.counts)
        return gathered.split(list(verdict.counts))  # type: ignore[no-any-return]

    return Plan(process_set, channel, call, execute)


@not_compiled
def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSetLike = global_process_set) -> list[Any]:
    """Return every rank's `obj`, in rank order.

    Collective: every member of `process_set` must call it. Errors as for `broadcast_object`.
    """
    plan = _plan_allgather_object(obj, name, process_set=process_set)
    return list(map(load, plan.run(), plan.channel.group.ranks))


def load(pickled: torch.Tensor, rank: int) -> Any:
    """Return the object of `rank`. Raises what unpickling it raises."""
    try:
        return pickle.loads(pickled.cpu().numpy().tobytes())
    except Exception as error:
        add_note(error, f"The object of rank {rank} could not be unpickled on this rank.")
        raise


# One outcome for all ranks: if a function fails on some ranks, all ranks raise an exception.


def attempted(function: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """Return the result of `function`, or its exception."""
    try:
        return function(), None
    except Exception as error:
        return None, error


def on_all_ranks(
    function: Callable[[], T], error: type[Exception], process_set: ProcessSetLike = global_process_set
) -> list[T]:
    """Run `function` on every rank, and return all results in rank order.

    Collective: every member of `process_set` must call it. Where `function` calls a collective, it must do so on every
    rank, whatever fails. The results are sent by pickle, so they must be small. When it raises on some ranks, each
    raises its own exception, and the others `error`, which quotes the first.
    """
    result, failure = attempted(function)
    problem = None if failure is None else f"{type(failure).__name__}: {text_of(failure)}"
    try:
        outcomes = allgather_object((result, problem), process_set=process_set)
    except HorovodInternalError as broken:
        raise failure or broken from None
    if failure is not None:
        raise failure
    ranks = channel_of(process_set).group.ranks
    failed = [(rank, problem) for rank, (_, problem) in zip(ranks, outcomes, strict=True) if problem is not None]
    if failed:
        rank, problem = failed[0]
        others = f" (and {len(failed) - 1} more ranks)" if len(failed) > 1 else ""
        raise error(f"Rank {rank}{others} failed: {problem}")
    return [result for result, _ in outcomes]


def if_all_succeed(
    function: Callable[[], T], error: type[Exception], process_set: ProcessSetLike = global_process_set
) -> T:
    """Do what `on_all_ranks` does, but return this rank's own result, which may be anything: it is not sent.

    For example, unpickling runs code of the user, and the ranks where that works cannot continue without the others.
    """
    results: list[T] = []
    on_all_ranks(lambda: results.append(function()), error, process_set)
    return results[0]
