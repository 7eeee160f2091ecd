"""Recording what a rank sends for agreements."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from dualdist.core.agreement.connections import Connections


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
