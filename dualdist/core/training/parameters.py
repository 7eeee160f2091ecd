"""Equal parameters and buffers of a model on all ranks."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, TypeVar, cast

import torch

from ..agreement.call import Kind
from ..agreement.connections import Verdict
from ..backends.base import Group
from ..checks import wrong
from ..collectives.broadcast import overwrite, root_payload
from ..collectives.objects import broadcast_object, if_all_succeed
from ..collectives.plan import Plan, channel_and_root, check_tensor, make_call, planned
from ..collectives.wire import as_bytes, dtype_name, from_bytes
from ..compiling import not_compiled
from ..world import ProcessSetLike, global_process_set

_LARGE_BYTES, _PACKED_BYTES = 1 << 18, 8 << 20
"""From which size on a tensor is sent from where it is, and about how many bytes of smaller ones are packed."""
_BATCH_BYTES = 128 << 20
"""About how many bytes are sent together, and therefore how much memory copies and packed tensors may take."""

T = TypeVar("T")
BROADCAST_PARAMETERS = Kind("broadcast_parameters", "BROADCAST")

Parameters = Mapping[str, Any] | Iterable[tuple[str, torch.Tensor]] | Iterable[torch.Tensor]


@not_compiled
def broadcast_parameters(params: Parameters, root_rank: int, process_set: ProcessSetLike = global_process_set) -> None:
    """Overwrite `params` with those of rank `root_rank`, in place.

    Collective: every member of `process_set` must call it.

    Args:
        params: `model.state_dict()`, `model.named_parameters()`, or an iterable of tensors; names, shapes and dtypes
            must be equal on all ranks. Any dtype and memory layout. What a module returns from `get_extra_state` may
            be any object that can be pickled, and is replaced in the dictionary: call `model.load_state_dict(state)`
            afterwards to apply it.
        root_rank: a global rank, equal on all ranks.

    Raises:
        ValueError, TypeError: `params` is something else, or an entry is not a tensor, or has no shape yet.
        HorovodInternalError: names, shapes or dtypes differ between ranks, or as for `broadcast`.
    """
    extra = plan_broadcast_parameters(params, root_rank, process_set=process_set).run()
    if extra:
        receive = functools.partial(broadcast_object, extra, root_rank, process_set=process_set)
        received = if_all_succeed(receive, RuntimeError, process_set)
        cast(MutableMapping[str, Any], params).update(received)


def is_extra_state(name: Any) -> bool:
    """Return whether an entry of a state_dict of this name is what a module's `get_extra_state` has returned."""
    return isinstance(name, str) and name.rpartition(".")[2] == "_extra_state"


@planned(BROADCAST_PARAMETERS)
def plan_broadcast_parameters(
    params: Parameters, root_rank: int, *, process_set: ProcessSetLike
) -> Plan[dict[str, Any]]:
    """Return the plan of a broadcast_parameters. Its result: the entries of this rank that are not tensors."""
    channel, root_rank, root = channel_and_root(process_set, root_rank)
    extra = {}
    if isinstance(params, MutableMapping):
        others = [(name, value) for name, value in params.items() if not isinstance(value, torch.Tensor)]
        extra = {name: value for name, value in others if is_extra_state(name)}
    named = [(name, tensor) for name, tensor in _named(params) if name not in extra]
    for name, tensor in named:
        if torch.nn.parameter.is_lazy(tensor):
            raise ValueError(
                f"`params[{name!r}]` must be initialized, but has no shape yet. Run a forward of the model first."
            )
        check_tensor(tensor, f"params[{name!r}]")
    tensors = [_unexpanded(tensor) for _, tensor in named]
    described = [(name, tuple(t.shape), dtype_name(t.dtype)) for (name, _), t in zip(named, tensors, strict=True)]
    call = make_call(
        BROADCAST_PARAMETERS,
        None,
        payload=root_payload(channel.group, tensors, root),
        root_rank=root_rank,
        parameters=(*described, *((name, "object") for name in sorted(extra))),
    )

    def execute(group: Group, verdict: Verdict) -> dict[str, Any]:
        if not any(verdict.payloads):
            for batch in in_batches(_messages(tensors), lambda message: sum(t.nbytes for t in message)):
                _broadcast(group, batch, root)
        elif group.rank != root:
            overwrite(tensors, verdict.payloads[root])
        return extra

    return Plan(process_set, channel, call, execute, tensors)


def _unexpanded(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of an expanded `tensor` that holds each number once, which can be written."""
    if 0 not in tensor.stride():
        return tensor
    return tensor.detach()[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in tensor.stride())]


def _named(params: Any) -> list[tuple[str, torch.Tensor]]:
    rule, fix = "a state_dict or named parameters", "Pass model.state_dict() or model.named_parameters()."
    if isinstance(params, Mapping):
        named = [(str(name), tensor) for name, tensor in params.items() if tensor is not None]
        return sorted(named, key=lambda entry: entry[0])
    is_model = isinstance(params, torch.nn.Module) and not isinstance(params, torch.nn.ParameterList)
    if is_model or isinstance(params, str | bytes | torch.Tensor) or not isinstance(params, Iterable):
        raise wrong("params", rule, params, fix)
    entries = list(params)
    named = [entry if isinstance(entry, tuple) else (str(place), entry) for place, entry in enumerate(entries)]
    if any(len(entry) != 2 or not isinstance(entry[0], str) for entry in named):
        raise ValueError(f"`params` must be {rule}, but has an entry that is no (name, tensor) instead. {fix}")
    return named


def in_batches(items: Iterable[T], size: Callable[[T], int]) -> Iterator[list[T]]:
    """Yield some of `items` at a time. size: returns the bytes of an item, the same on all ranks."""
    batch: list[T] = []
    num_bytes = 0
    for item in items:
        batch.append(item)
        num_bytes += size(item)
        if num_bytes >= _BATCH_BYTES:
            yield batch
            batch, num_bytes = [], 0
    if batch:
        yield batch


def _messages(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yield the tensors of one message at a time: a large one alone, or small ones of one dtype on one device."""
    packed: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    num_bytes: Counter[tuple[torch.dtype, torch.device]] = Counter()
    for tensor in tensors:
        if (length := tensor.nbytes) >= _LARGE_BYTES:
            yield [tensor]
        elif length:
            kind = tensor.dtype, tensor.device
            packed.setdefault(kind, []).append(tensor)
            num_bytes[kind] += length
            if num_bytes[kind] > _PACKED_BYTES:
                yield packed.pop(kind)
                del num_bytes[kind]
    yield from packed.values()


def _broadcast(group: Group, batch: Sequence[Sequence[torch.Tensor]], root: int) -> None:
    """Send the messages of `batch` at the same time, and write what has arrived."""
    # .data, because a buffer that autograd has saved, such as batch norm's, may change before backward.
    messages = [[tensor.data for tensor in tensors] for tensors in batch]
    sent: list[torch.Tensor] = []

    def prepare() -> Iterator[torch.Tensor]:
        for tensors in messages:
            sent.append(_packed(tensors, group, root))
            yield sent[-1]

    # The group may read a generator in another thread, which has other streams.
    is_on_cpu = all([tensors[0].is_cpu for tensors in messages])
    group.broadcast_all_(prepare() if is_on_cpu else list(prepare()), root).wait()
    if group.rank != root:
        for data, tensors in zip(sent, messages, strict=True):
            _unpack(data, tensors)


def _packed(tensors: Sequence[torch.Tensor], group: Group, root: int) -> torch.Tensor:
    """Return the numbers of `tensors` as ((n,), uint8), on ranks other than `root` only memory for them."""
    if len(tensors) == 1:
        return as_bytes(tensors[0], group)
    if group.rank == root:
        return as_bytes(torch.cat([tensor.reshape(-1) for tensor in tensors]), group)
    num_bytes = sum(tensor.nbytes for tensor in tensors)
    return torch.empty(num_bytes, dtype=torch.uint8, device=group.wire_device(tensors[0].device))


@torch.no_grad()
def _unpack(data: torch.Tensor, tensors: list[torch.Tensor]) -> None:
    if data.data_ptr() == tensors[0].data_ptr():
        return
    flat = from_bytes(data, (-1,), tensors[0])
    parts = flat.split([tensor.numel() for tensor in tensors])
    for tensor, part in zip(tensors, parts, strict=True):
        tensor.copy_(part.view(tensor.shape))
