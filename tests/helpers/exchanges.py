"""Recording what a rank sends."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest
import torch

from dualdist.core.agreement.connections import Connections
from dualdist.core.backends.base import Group, Work


@contextlib.contextmanager
def exchanges() -> Iterator[list[int]]:
    """Yield the lengths of the messages that this rank sends for agreements in the `with` block."""
    made: list[int] = []
    exchange = Connections.allgather_messages

    def counted(self: Connections, message: bytes) -> list[bytes]:
        made.append(len(message))
        return exchange(self, message)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Connections, "allgather_messages", counted)
        yield made


@contextlib.contextmanager
def reductions(group: Group, record: Callable[[torch.Tensor], object]) -> Iterator[None]:
    """Call `record` with each tensor that `group` reduces in the `with` block."""
    allreduce = group.allreduce_

    def recorded(tensor: torch.Tensor, op: int, tag: str = "") -> Work:
        record(tensor)
        return allreduce(tensor, op, tag)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(group, "allreduce_", recorded)
        yield
