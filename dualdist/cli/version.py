"""The version of dualdist."""

from __future__ import annotations

import importlib.metadata

__all__ = ("version",)


def version() -> str:
    """Return the version of the installed package, 'not installed' for a source tree."""
    try:
        return importlib.metadata.version("dualdist")
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
