"""Broadcasts of few bytes: the root sends them with the agreement, so that no second exchange is needed."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..agreement.verdict import payload_capacity
from ..backends.base import Group
from .wire import bytes_of, from_bytes

__all__ = ("overwrite", "root_payload")

_SENDERS, _MOST_BYTES = 1, 1 << 16
"""The root alone sends a payload, of at most so many bytes."""


def root_payload(group: Group, tensors: Sequence[torch.Tensor], root: int) -> bytes:
    """Return the numbers of `tensors` if this is the member `root`, and if they are few and on the CPU; else b""."""
    most = payload_capacity(_SENDERS, _MOST_BYTES)
    if group.rank != root or sum(tensor.nbytes for tensor in tensors) > most:
        return b""
    if not all(tensor.is_cpu and group.wire_device(tensor.device).type == "cpu" for tensor in tensors):
        return b""
    return b"".join([bytes_of(tensor) for tensor in tensors])


@torch.no_grad()
def overwrite(tensors: Sequence[torch.Tensor], payload: bytes) -> None:
    """Overwrite `tensors` with the numbers in `payload`, which is not empty. Autograd does not notice."""
    data = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    for tensor, part in zip(tensors, data.split([tensor.nbytes for tensor in tensors]), strict=True):
        tensor.data.copy_(from_bytes(part, tensor.shape, tensor))
