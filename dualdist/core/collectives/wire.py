"""The wire format: users' tensors as flat, contiguous tensors that every backend accepts, and collectives of such.

Data that is only moved is sent as bytes, so every dtype works on every backend. Data that is reduced is sent in a dtype
that the backend can reduce, complex numbers as pairs: reduction.py packs it.
"""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Sequence

import torch

from ..backends.base import Group


def as_bytes(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    """Return the numbers of `tensor` as ((n,), uint8) on the wire device; a view if possible."""
    sent = tensor.detach().to(group.wire_device(tensor.device)).resolve_conj().resolve_neg().contiguous()
    # A tensor with one element is contiguous with any stride, but torch views it as bytes only with stride 1.
    return sent.as_strided((sent.numel(),), (1,)).view(torch.uint8)


def from_bytes(data: torch.Tensor, shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    """Return ((n,), uint8) as a tensor of `shape` with the dtype and on the device of `like`."""
    if data.storage_offset() % like.element_size():
        data = data.clone()
    return data.view(like.dtype).reshape(tuple(shape)).to(like.device)


@functools.cache
def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of `dtype`, such as "float32"."""
    return str(dtype).removeprefix("torch.")


# Rows of tensors as bytes, on any Group.


def allgather_rows(
    group: Group, tensors: Sequence[torch.Tensor], rows: Sequence[int] | None = None
) -> tuple[list[torch.Tensor], list[int]]:
    """Return for each of `tensors` ((n, ...) on a member) the rows of all members: (sum of n, ...), in rank order.

    Also return where the rows of this member begin in each. rows: n of each member, for one tensor; None: unknown.
    """
    row_bytes = [_row_bytes(tensor) for tensor in tensors]
    if rows is None:
        layout = struct.Struct(f"<{len(tensors)}q")
        own = layout.pack(*[tensor.shape[0] for tensor in tensors])
        row_counts = [layout.unpack(message) for message in group.allgather_bytes(own)]
    else:
        row_counts = [(count,) for count in rows]
    # For each member, the bytes of each of its tensors.
    sizes = [[count * width for count, width in zip(counts, row_bytes, strict=True)] for counts in row_counts]
    totals = [sum(member) for member in sizes]
    data = torch.cat([as_bytes(tensor, group) for tensor in tensors])
    gathered = group.allgatherv(data, totals) if sum(totals) else data
    parts = [part.split(member) for part, member in zip(gathered.split(totals), sizes, strict=True)]
    whole = []
    for index, tensor in enumerate(tensors):
        data = torch.cat([part[index] for part in parts])
        shape = sum(counts[index] for counts in row_counts), *tensor.shape[1:]
        whole.append(from_bytes(data, shape, tensor))
    return whole, [sum(counts[: group.rank]) for counts in zip(*row_counts, strict=True)]


def broadcast_into(group: Group, tensor: torch.Tensor, root: int) -> None:
    """Overwrite `tensor` with that of the member with index `root`."""
    if tensor.numel() == 0:
        return
    data = as_bytes(tensor, group)
    group.broadcast_(data, root).wait()
    if data.data_ptr() != tensor.data_ptr():
        with torch.no_grad():
            tensor.copy_(from_bytes(data, tensor.shape, tensor))


def alltoall_rows(
    group: Group,
    tensor: torch.Tensor,
    splits: Sequence[int],
    totals: Sequence[int],
    received: Sequence[int] | None = None,
) -> tuple[torch.Tensor, list[int]]:
    """Send splits[i] rows of `tensor` ((n, ...)) to member i. Return the received rows and their number from each.

    totals: how many rows each member sends. received: how many of them arrive from each member; None: not known.
    """
    if received is None:
        numbers = torch.tensor(splits, dtype=torch.int64, device="cpu")
        data, each = as_bytes(numbers, group), [numbers.element_size()] * group.size
        output = torch.empty_like(data)
        group.alltoall(output, data, each, each).wait()
        received = from_bytes(output, numbers.shape, numbers).tolist()
    row_bytes = _row_bytes(tensor)
    data = as_bytes(tensor, group)[: sum(splits) * row_bytes]
    output = torch.empty(sum(received) * row_bytes, dtype=torch.uint8, device=data.device)
    if any(totals) and row_bytes:
        group.alltoall(
            output, data, [count * row_bytes for count in received], [count * row_bytes for count in splits]
        ).wait()
    return from_bytes(output, (sum(received), *tensor.shape[1:]), tensor), list(received)


def _row_bytes(tensor: torch.Tensor) -> int:
    return math.prod(tensor.shape[1:]) * tensor.element_size()
