"""Reducing: allreduce, grouped_allreduce, reducescatter, reduce. What they compute, on any Group.

The rule is Horovod's: out = postscale * reduce(prescale * x), Average being the Sum with postscale / size
(horovod/common/ops/gloo_operations.cc:162, collective_operations.cc:64), also while ranks have joined. Integers are
scaled in double precision and truncated toward zero; averages of integers divide exactly.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..agreement.call import Call
from ..agreement.verdict import payload_capacity
from ..backends.base import Group
from ..types import REDUCE_OP_NAMES, Adasum, Average, Max, Min, Product, Sum
from .adasum import adasum
from .move import gather_rows
from .wire import neutral, pack, reduction_dtype, unpack

__all__ = (
    "Reduction",
    "contribute_nothing",
    "payload_of",
    "reduce_payloads",
    "reduce_tensors",
    "scale_",
    "sum_sparse",
)


@dataclass(frozen=True)
class Reduction:
    """How numbers are combined."""

    op: int = Average
    prescale_factor: float = 1.0
    postscale_factor: float = 1.0

    @classmethod
    def of(cls, call: Call) -> Reduction:
        """Return the Reduction that `call` asks for."""
        given = dict(call.arguments)
        return cls(REDUCE_OP_NAMES.index(given["op"]), given["prescale_factor"], given["postscale_factor"])


def reduce_tensors(group: Group, tensors: Sequence[torch.Tensor], reduction: Reduction) -> None:
    """Reduce `tensors` in place over `group`, those of one dtype and device together."""
    classes: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = defaultdict(list)
    for tensor in tensors:
        classes[tensor.dtype, tensor.device].append(tensor)
    for (dtype, device), members in classes.items():
        wire_dtype, wire_device = reduction_dtype(dtype, group), group.wire_device(device)
        only = members[0]
        if len(members) == 1 and only.is_contiguous() and (dtype, device) == (wire_dtype, wire_device):
            _reduce_flat(group, only.detach().view(-1), reduction, [only])
            continue
        flat = pack(members, wire_dtype, wire_device)
        _reduce_flat(group, flat, reduction, members)
        with torch.no_grad():
            unpack(flat, members)


def _reduce_flat(
    group: Group, flat: torch.Tensor, reduction: Reduction, members: Sequence[torch.Tensor]
) -> None:
    scale_(flat, reduction.prescale_factor)
    if reduction.op == Adasum:
        sizes = [member.numel() for member in members]
        adasum(group, list(flat.split(sizes)))
    else:
        group.allreduce_(flat, Sum if reduction.op == Average else reduction.op).wait()
    _finish(flat, reduction, group.size)


def _finish(flat: torch.Tensor, reduction: Reduction, size: int) -> None:
    """Scale the combined numbers in place."""
    if reduction.op != Average:
        scale_(flat, reduction.postscale_factor)
    elif flat.is_floating_point() or reduction.postscale_factor != 1.0:
        scale_(flat, reduction.postscale_factor / size)
    else:
        flat.copy_(torch.div(flat, size, rounding_mode="trunc"))


def payload_of(group: Group, tensors: Sequence[torch.Tensor], reduction: Reduction) -> bytes:
    """Return what travels along with the call in place of a reduction of its own; nothing when it does not fit."""
    first = tensors[0]
    if first.device.type != "cpu" or reduction.op == Adasum or any(t.dtype != first.dtype for t in tensors):
        return b""
    dtype = reduction_dtype(first.dtype, group)
    numel = sum(tensor.numel() for tensor in tensors) * (2 if first.is_complex() else 1)
    if numel * dtype.itemsize > payload_capacity(group.size):
        return b""
    flat = pack(tensors, dtype, first.device)
    scale_(flat, reduction.prescale_factor)
    return flat.view(torch.uint8).numpy().tobytes()


def reduce_payloads(
    group: Group, payloads: Sequence[bytes], tensors: Sequence[torch.Tensor], reduction: Reduction
) -> None:
    """Overwrite `tensors` with the reduction of every member's payload; the same on all members to the last bit."""
    dtype = reduction_dtype(tensors[0].dtype, group)
    rows = torch.frombuffer(bytearray(b"".join(payloads)), dtype=dtype).view(len(payloads), -1)
    combine = {Min: torch.amin, Max: torch.amax}.get(reduction.op)
    if combine is not None:
        flat = combine(rows, dim=0)
    else:
        flat = (torch.prod if reduction.op == Product else torch.sum)(rows, dim=0, dtype=dtype)
    _finish(flat, reduction, group.size)
    with torch.no_grad():
        unpack(flat, tensors)


def sum_sparse(group: Group, tensor: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    """Return the sum of every member's sparse COO `tensor`, coalesced. None: nothing, in the shape of `like`."""
    if tensor is None:
        tensor = torch.sparse_coo_tensor(
            torch.zeros(1, 0, dtype=torch.int64),
            like.new_zeros(0, *like.shape[1:]),
            like.shape,
            check_invariants=False,
        )
    mine = tensor.coalesce()
    indices, values = gather_rows(group, [mine.indices().t().contiguous(), mine.values()])
    return torch.sparse_coo_tensor(
        indices.t(), values, like.shape, device=like.device, check_invariants=False
    ).coalesce()


def scale_(flat: torch.Tensor, factor: float) -> None:
    """Multiply in place; integers in double precision, truncated toward zero."""
    if factor == 1.0:
        return
    if flat.is_floating_point():
        flat.mul_(factor)
    else:
        flat.copy_(flat.double().mul_(factor).to(flat.dtype))


def contribute_nothing(group: Group, call: Call, device: torch.device) -> None:
    """Take part in the others' reduction `call` without changing its result, as a rank that has joined."""
    given, op = dict(call.arguments), Reduction.of(call).op
    tensors = []
    for shape, name in zip(given["shapes"], given["dtypes"], strict=True):
        dtype = getattr(torch, name)
        tensors.append(torch.full(shape, neutral(dtype, op), dtype=dtype, device=device))
    reduce_tensors(group, tensors, Reduction(op))
