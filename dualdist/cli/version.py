"""Which version of dualdist this is."""

from __future__ import annotations

import importlib.metadata

__all__ = ("version",)


def version() -> str:
    """Return the version of the installed package; a source tree that is not installed has none."""
    try:
        return importlib.metadata.version("dualdist")
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
