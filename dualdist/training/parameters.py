"""Equal parameters and optimizer state on all ranks: those of one rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from ..agreement import call_kinds
from ..backends.base import Group
from ..collectives.objects import broadcast_object
from ..collectives.on_all_ranks import unpickled_on_all_ranks
from ..collectives.plans.arguments import check_root, check_tensor
from ..collectives.plans.plan import Plan, make_call, planned
from ..collectives.wire import as_bytes, from_bytes
from ..world.process_sets import ProcessSet, channel_of, global_process_set

__all__ = ("broadcast_optimizer_state", "broadcast_parameters")

_CHUNK_BYTES = 32 << 20

Parameters = Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]] | Iterable[torch.Tensor]


def broadcast_parameters(
    params: Parameters, root_rank: int, process_set: ProcessSet = global_process_set
) -> None:
    """Overwrite `params` with those of rank `root_rank`, in place.

    Collective: every member of `process_set` must call it, in the same order.

    Args:
        params: `model.state_dict()`, `model.named_parameters()`, or an iterable of tensors; names, shapes and dtypes
            must be equal on all ranks. Any dtype and memory layout.
        root_rank: a global rank, equal on all ranks.

    Raises:
        ValueError: `params` is something else, or an entry is not a tensor.
        HorovodInternalError: names, shapes or dtypes differ between ranks, or as for `broadcast`.
    """
    plan_broadcast_parameters(params, root_rank, process_set=process_set).run()


@planned(call_kinds.BROADCAST_PARAMETERS)
def plan_broadcast_parameters(params: Parameters, root_rank: int, *, process_set: ProcessSet) -> Plan[None]:
    root, channel = check_root(root_rank, process_set), channel_of(process_set)
    named = _named(params)
    for name, tensor in named:
        check_tensor(tensor, name)
    call = make_call(
        call_kinds.BROADCAST_PARAMETERS,
        None,
        root_rank=root_rank,
        parameters=tuple((name, tuple(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in named),
    )
    tensors = [tensor for _, tensor in named]
    return Plan(channel, call, lambda group, verdict: _overwrite(group, tensors, root))


def _named(params: Any) -> list[tuple[str, torch.Tensor]]:
    if isinstance(params, Mapping):
        return [(str(name), tensor) for name, tensor in sorted(params.items()) if tensor is not None]
    if isinstance(params, str | bytes | torch.Tensor) or not isinstance(params, Iterable):
        raise ValueError(
            f"`params` must be a state_dict or named parameters, but is {type(params).__name__} instead."
        )
    entries = list(params)
    return [entry if isinstance(entry, tuple) else (str(place), entry) for place, entry in enumerate(entries)]


def _overwrite(group: Group, tensors: Sequence[torch.Tensor], root: int) -> None:
    """Broadcast `tensors` in place, packed into messages of about 32 MiB."""
    pending: list[torch.Tensor] = []
    size = 0
    for tensor in tensors:
        if pending and (size > _CHUNK_BYTES or pending[0].device != tensor.device):
            _overwrite_chunk(group, pending, root)
            pending, size = [], 0
        pending.append(tensor)
        size += tensor.numel() * tensor.element_size()
    if pending:
        _overwrite_chunk(group, pending, root)


def _overwrite_chunk(group: Group, tensors: Sequence[torch.Tensor], root: int) -> None:
    data = torch.cat([as_bytes(tensor, group) for tensor in tensors])
    if not data.numel():
        return
    group.broadcast_(data, root).wait()
    if group.rank == root:
        return
    parts = data.split([tensor.numel() * tensor.element_size() for tensor in tensors])
    with torch.no_grad():
        for tensor, part in zip(tensors, parts, strict=True):
            # .data, because a buffer that autograd has saved, such as batch norm's, may change before backward.
            tensor.data.copy_(from_bytes(part, tensor.shape, tensor))


@dataclass(frozen=True)
class _TensorSpec:
    """Replaces a tensor in the pickled state of an optimizer."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int, model: torch.nn.Module | None = None
) -> None:
    """Overwrite the state and the options (lr, betas ...) of `optimizer` with those of rank `root_rank`.

    It takes no step to create state, so weights and step counts do not change. Works for every optimizer, including
    LBFGS and optimizers without state. Collective over the world.

    Args:
        optimizer: its parameters must be equal in number and shape on all ranks.
        model: accepted as in Horovod (horovod/torch/functions.py:68), without effect.

    Raises:
        ValueError: `root_rank` is not a rank, or the number of parameters differs from the root's.
        HorovodInternalError: as for `broadcast`.
    """
    is_root = channel_of(global_process_set).group.rank == root_rank
    state = optimizer.state_dict() if is_root else None
    specified = tree_map_only(
        torch.Tensor, lambda tensor: _TensorSpec(tuple(tensor.shape), tensor.dtype), state
    )
    template = unpickled_on_all_ranks(lambda: broadcast_object(specified, root_rank))
    if is_root:
        tensors = [leaf.detach().cpu() for leaf in tree_leaves(state) if isinstance(leaf, torch.Tensor)]
    else:
        specs = [leaf for leaf in tree_leaves(template) if isinstance(leaf, _TensorSpec)]
        tensors = [torch.empty(spec.shape, dtype=spec.dtype) for spec in specs]
    broadcast_parameters(tensors, root_rank)
    if not is_root:
        received = iter(tensors)
        _load_in_place(optimizer, tree_map_only(_TensorSpec, lambda _: next(received), template))


def _load_in_place(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    """Load `state_dict`, but keep the dictionaries of groups and state: schedulers and wrappers refer to them."""
    groups, state = optimizer.param_groups, optimizer.state
    optimizer.load_state_dict(state_dict)
    for group, loaded in zip(groups, optimizer.param_groups, strict=True):
        group.update(loaded)
    loaded_state = dict(optimizer.state)
    state.clear()
    state.update(loaded_state)
    optimizer.param_groups, optimizer.state = groups, state
