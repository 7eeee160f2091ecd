"""Leaving the world of a test and joining it again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import dualdist as hvd

__all__ = ("left",)


@contextmanager
def left() -> Iterator[None]:
    """Leave the world for the body, and join it again after it if the body has not."""
    hvd.shutdown()
    try:
        yield
    finally:
        hvd.init()
