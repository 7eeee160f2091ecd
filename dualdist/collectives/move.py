"""Moving: allgather, broadcast, alltoall, gather, scatter. What they do with bytes, on any Group."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence

import torch

from ..backends.base import Group
from .wire import as_bytes, from_bytes

__all__ = ("broadcast_into", "exchange_numbers", "exchange_rows", "gather_rows", "split_rows")


def gather_rows(
    group: Group, tensors: Sequence[torch.Tensor], rows: Sequence[int] | None = None
) -> list[torch.Tensor]:
    """Return for each of `tensors` ((n_rank, ...)) every rank's rows behind one another: (sum n_rank, ...).

    rows: every rank's n for a single tensor, when it is known.
    """
    width = [_row_bytes(tensor) for tensor in tensors]
    if rows is None:
        table = exchange_numbers(group, [tensor.shape[0] for tensor in tensors])
    else:
        table = [[count] for count in rows]
    data = torch.cat([as_bytes(tensor, group) for tensor in tensors])
    counts = [sum(count * size for count, size in zip(line, width, strict=True)) for line in table]
    gathered = group.allgatherv(data, counts) if sum(counts) else data
    parts = [
        list(part.split(_sizes(line, width)))
        for part, line in zip(gathered.split(counts), table, strict=True)
    ]
    return [
        from_bytes(
            torch.cat([part[place] for part in parts]),
            (sum(line[place] for line in table), *tensor.shape[1:]),
            tensor,
        )
        for place, tensor in enumerate(tensors)
    ]


def broadcast_into(group: Group, tensor: torch.Tensor, root: int) -> None:
    """Overwrite `tensor` with that of the member at place `root`."""
    if tensor.numel() == 0:
        return
    data = as_bytes(tensor, group)
    group.broadcast_(data, root).wait()
    if data.data_ptr() != tensor.data_ptr():
        with torch.no_grad():
            tensor.copy_(from_bytes(data, tensor.shape, tensor))


def exchange_rows(
    group: Group, tensor: torch.Tensor, splits: Sequence[int]
) -> tuple[torch.Tensor, list[int]]:
    """Send splits[i] rows of `tensor` ((n, ...)) to member i; return what came, and how many rows from each."""
    table = exchange_numbers(group, splits)
    received = [line[group.rank] for line in table]
    width = _row_bytes(tensor)
    data = as_bytes(tensor, group)[: sum(splits) * width]
    output = torch.empty(sum(received) * width, dtype=torch.uint8, device=data.device)
    if any(map(any, table)) and width:
        group.alltoall(
            output, data, [count * width for count in received], [count * width for count in splits]
        ).wait()
    return from_bytes(output, (sum(received), *tensor.shape[1:]), tensor), received


def exchange_numbers(group: Group, numbers: Sequence[int]) -> list[list[int]]:
    """Return every member's `numbers`, equally many on each."""
    layout = struct.Struct(f"<{len(numbers)}q")
    return [list(layout.unpack(message)) for message in group.allgather_bytes(layout.pack(*numbers))]


def split_rows(rows: int, size: int) -> list[int]:
    """Return how many of `rows` each of `size` ranks gets: the first ranks get one more (opcc:1805)."""
    return [rows // size + (place < rows % size) for place in range(size)]


def _row_bytes(tensor: torch.Tensor) -> int:
    return math.prod(tensor.shape[1:]) * tensor.element_size()


def _sizes(rows: Sequence[int], width: Sequence[int]) -> list[int]:
    return [count * size for count, size in zip(rows, width, strict=True)]
