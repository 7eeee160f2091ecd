"""Reading the warnings of dualdist in a test."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def warned() -> Iterator[list[str]]:
    """Collect dualdist's log messages instead of printing them."""
    logger = logging.getLogger("dualdist")
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield messages
    finally:
        logger.propagate = True
        logger.removeHandler(handler)
