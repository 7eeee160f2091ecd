"""The names of the package `horovod` itself."""

from __future__ import annotations

from dualdist import run

__all__ = ("__version__", "run")

__version__ = "0.28.1"
"""The release of Horovod whose API dualdist has."""
