"""Leaving the world in a test and joining it again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import dualdist as hvd

__all__ = ("outside_world",)


@contextmanager
def outside_world() -> Iterator[None]:
    """Leave the world for the body of the `with`; join it again afterwards if the body has not."""
    hvd.shutdown()
    try:
        yield
    finally:
        hvd.init()
