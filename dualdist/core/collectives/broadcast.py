"""broadcast in all its forms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..agreement.call import Kind
from ..agreement.connections import Verdict
from ..backends.base import Group
from ..compiling import not_compiled
from ..types import Average
from ..world import ProcessSetLike, channel_of, global_process_set
from .allreduce import allreduce_gradient, plan_allreduce
from .plan import Plan, channel_and_root, check_tensor, make_call, planned, root_of
from .reduction import Reduction, bytes_of
from .wire import broadcast_into, dtype_name, from_bytes

BROADCAST = Kind("broadcast", "BROADCAST")

# Broadcasts of few bytes: the root sends them with the agreement, so that no second exchange is needed.

_MOST_BYTES = 1 << 16
"""The root alone sends a payload, so it may be longer than those of other collectives."""


def root_payload(group: Group, tensors: Sequence[torch.Tensor], root: int) -> bytes:
    """Return the numbers of `tensors` if this is the member `root`, and if they are few and on the CPU; else b""."""
    if group.rank != root or sum(tensor.nbytes for tensor in tensors) > _MOST_BYTES:
        return b""
    return b"".join(map(bytes_of, tensors)) if all(tensor.is_cpu for tensor in tensors) else b""


@torch.no_grad()
def overwrite(tensors: Sequence[torch.Tensor], payload: bytes) -> None:
    """Overwrite `tensors` with the numbers in `payload`, which is not empty. Autograd does not notice."""
    data = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    for tensor, part in zip(tensors, data.split([tensor.nbytes for tensor in tensors]), strict=True):
        tensor.data.copy_(from_bytes(part, tensor.shape, tensor))


@planned(BROADCAST)
def plan_broadcast(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    *,
    in_place: bool = False,
    process_set: ProcessSetLike,
) -> Plan[torch.Tensor]:
    """Return the plan of a broadcast. Its result: `tensor` itself, or a new tensor."""
    channel, root_rank, root = channel_and_root(process_set, root_rank)
    check_tensor(tensor)
    call = make_call(
        BROADCAST,
        name,
        payload=root_payload(channel.group, [tensor], root),
        root_rank=root_rank,
        shape=tuple(tensor.shape),
        dtype=dtype_name(tensor.dtype),
        device=tensor.device.type,
    )

    def execute(group: Group, verdict: Verdict) -> torch.Tensor:
        output = tensor if in_place else tensor.detach().clone()
        if not any(verdict.payloads):
            broadcast_into(group, output, root)
        elif group.rank != root:
            overwrite([output], verdict.payloads[root])
        return output

    return Plan(process_set, channel, call, execute, [tensor])


@not_compiled
def broadcast(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSetLike = global_process_set,
    *,
    gradient: int = Average,
) -> torch.Tensor:
    """Return rank `root_rank`'s `tensor` on every rank; differentiable.

    Collective: every member of `process_set` must call it.

    Args:
        tensor: any shape and dtype, equal on all ranks; any memory layout.
        root_rank: a global rank, equal on all ranks.
        name: as for `allreduce`.
        gradient: Average (default), as in Horovod, for the average of the ranks' gradients on the root; Sum for the
            gradient of the sum of all ranks' losses.

    Returns:
        A new tensor of the same shape, dtype and device.

    Raises ValueError and HorovodInternalError as `allreduce` does.
    """
    return plan_broadcast(tensor, root_rank, name, process_set=process_set).run(broadcast_gradient, gradient)


@not_compiled
def broadcast_async(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSetLike = global_process_set
) -> int:
    """Start a `broadcast` and return a handle; `synchronize` returns the new tensor. Not differentiable.

    Collective like `broadcast`, with the same arguments, shapes and errors.
    """
    return plan_broadcast(tensor, root_rank, name, process_set=process_set).submit()


@not_compiled
def broadcast_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSetLike = global_process_set
) -> torch.Tensor:
    """Overwrite `tensor` with rank `root_rank`'s and return it. Not differentiable.

    Collective like `broadcast`, with the same arguments, shapes and errors.
    """
    return plan_broadcast(tensor, root_rank, name, in_place=True, process_set=process_set).run()


@not_compiled
def broadcast_async_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSetLike = global_process_set
) -> int:
    """Start a `broadcast_` and return a handle; `synchronize` returns `tensor` itself. Not differentiable.

    Collective like `broadcast`, with the same arguments, shapes and errors.
    """
    return plan_broadcast(tensor, root_rank, name, in_place=True, process_set=process_set).submit()


def broadcast_gradient(ran: Any, grad: torch.Tensor) -> Sequence[torch.Tensor]:
    """Return the gradient of broadcast.

    The average over the ranks on the root, else 0 (horovod/torch/mpi_ops.py:813), or the sum in place of the average.
    """
    plan = plan_allreduce([grad], Reduction(ran.gradient), process_set=ran.process_set)
    (total,) = plan.run(allreduce_gradient)
    group = channel_of(ran.process_set).group
    return [total if group.ranks[group.rank] == root_of(ran) else torch.zeros_like(total)]
