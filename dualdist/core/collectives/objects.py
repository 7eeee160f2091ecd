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
from ..agreement.matching import Verdict
from ..backends.base import Group
from ..checks import add_note, items, text_of
from ..compiling import not_compiled
from ..world.process_sets import ProcessSetLike, channel_of, global_process_set, reporting
from .plan import channel_and_root, make_call
from .wire import allgather_rows, alltoall_rows, gather_rows

# Sent with pickle, or with cloudpickle if it is installed.
#
# The functions unpickle after the collective: unpickling runs code of the objects' classes. If that code raises an
# exception, it must not look like a failure of the collective.

T = TypeVar("T")
ALLGATHER_OBJECT = Kind("allgather_object", "ALLGATHER")
BROADCAST_OBJECT = Kind("broadcast_object", "BROADCAST")
GATHER_OBJECT = Kind("gather_object", "GATHER")
SCATTER_OBJECT = Kind("scatter_object", "SCATTER")
_NO_BYTES = torch.empty(0, dtype=torch.uint8, device="cpu")


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


def _dump(obj: Any) -> torch.Tensor:
    """Return `obj` pickled, (n,) uint8."""
    file = io.BytesIO()
    _pickler()(file).dump(obj)
    return torch.frombuffer(bytearray(file.getbuffer()), dtype=torch.uint8)


@not_compiled
def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSetLike = global_process_set
) -> Any:
    """Return rank `root_rank`'s `obj` on every rank: the object itself on the root, a copy elsewhere.

    Collective: every member of `process_set` must call it; `obj` is ignored on the other ranks.
    If pickling fails, its error is raised on the root and HorovodInternalError on the other ranks. If unpickling fails
    on a rank, its error is raised there alone.
    """
    with reporting(BROADCAST_OBJECT, process_set):
        channel, root_rank, root = channel_and_root(process_set, root_rank)
        is_root = channel.group.rank == root
        data = _dump(obj) if is_root else _NO_BYTES
        call = make_call(BROADCAST_OBJECT, name, count=data.numel(), root_rank=root_rank)

    def execute(group: Group, verdict: Verdict) -> torch.Tensor:
        sent = data if is_root else torch.empty(verdict.counts[root], dtype=torch.uint8, device="cpu")
        sent = sent.to(group.wire_device(sent.device))
        group.broadcast_(sent, root).wait()
        return sent

    received = channel.run(call, execute)
    return obj if is_root else _load(received, root_rank)


@not_compiled
def allgather_object(
    obj: Any, name: str | None = None, process_set: ProcessSetLike = global_process_set
) -> list[Any]:
    """Return every rank's `obj`, in rank order.

    Collective: every member of `process_set` must call it. Errors as for `broadcast_object`.
    """
    with reporting(ALLGATHER_OBJECT, process_set):
        channel, data = channel_of(process_set), _dump(obj)
        call = make_call(ALLGATHER_OBJECT, name, count=data.numel())

    def execute(group: Group, verdict: Verdict) -> Sequence[torch.Tensor]:
        (gathered,), _ = allgather_rows(group, [data], verdict.counts)
        return gathered.split(list(verdict.counts))  # type: ignore[no-any-return]

    return list(map(_load, channel.run(call, execute), channel.group.ranks))


@not_compiled
def gather_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSetLike = global_process_set
) -> list[Any] | None:
    """Return every rank's `obj` in rank order on rank `root_rank`, None elsewhere.

    Collective: every member of `process_set` must call it. Errors as for `broadcast_object`.
    """
    with reporting(GATHER_OBJECT, process_set):
        channel, root_rank, root = channel_and_root(process_set, root_rank)
        data = _dump(obj)
        call = make_call(GATHER_OBJECT, name, count=data.numel(), root_rank=root_rank)

    def execute(group: Group, verdict: Verdict) -> Sequence[torch.Tensor]:
        rows, counts = gather_rows(group, data, root, verdict.counts)
        return rows.split(counts)  # type: ignore[no-any-return]

    received = channel.run(call, execute)
    return list(map(_load, received, channel.group.ranks)) if channel.group.rank == root else None


@not_compiled
def scatter_object(
    objs: Sequence[Any] | None,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSetLike = global_process_set,
) -> Any:
    """Return a copy of the object for this rank in rank `root_rank`'s list `objs`, which has one object per rank.

    Collective: every member of `process_set` must call it; `objs` is ignored on the other ranks.
    If their number is wrong, the root raises ValueError, the others HorovodInternalError; else as `broadcast_object`.
    """
    with reporting(SCATTER_OBJECT, process_set):
        channel, root_rank, root = channel_and_root(process_set, root_rank)
        size, is_root = channel.group.size, channel.group.rank == root
        rule = f"a list with one object for each of {size} ranks on the root"
        given = items("objs", objs, rule, "Wrap each rank's object.") if is_root else []
        if is_root and len(given) != size:
            raise ValueError(f"`objs` must be {rule}, but has {len(given)} objects instead.")
        pickled = [_dump(obj) for obj in given] or [_NO_BYTES] * size
        data, splits = torch.cat(pickled), [each.numel() for each in pickled]
        call = make_call(SCATTER_OBJECT, name, count=data.numel(), root_rank=root_rank)

    def execute(group: Group, verdict: Verdict) -> torch.Tensor:
        return alltoall_rows(group, data, splits, verdict.counts)[0]

    return _load(channel.run(call, execute), root_rank)


def _load(pickled: torch.Tensor, rank: int) -> Any:
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
    failed = [
        (rank, problem)
        for rank, (_, problem) in zip(channel_of(process_set).group.ranks, outcomes, strict=True)
        if problem is not None
    ]
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
