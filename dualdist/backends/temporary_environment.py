"""Environment variables that a backend reads with getenv, set only while it needs them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping

__all__ = ("temporary_environment",)


@contextlib.contextmanager
def temporary_environment(variables: Mapping[str, str | None]) -> Iterator[None]:
    """Set `variables` (None: unset) in the `with` block, then restore the old values, which launch detection reads."""
    before = {name: os.environ.get(name) for name in variables}
    _set(variables)
    try:
        yield
    finally:
        _set(before)


def _set(variables: Mapping[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
