"""The names of the package `horovod` itself."""

from __future__ import annotations

from typing import Any

from ..errors import ConfigurationError

__all__ = ("__version__", "run")

__version__ = "0.28.1"
"""The release of Horovod whose API dualdist has."""


def run(func: Any, *args: Any, **kwargs: Any) -> list[Any]:
    """Raise ConfigurationError: under dualdist.compat a launcher starts the processes, not the script."""
    count = kwargs.get("num_proc") or kwargs.get("np") or "N"
    raise ConfigurationError(
        "`horovod.run` must be replaced by a launcher under dualdist.compat. "
        f"Start the script with: torchrun --nproc-per-node {count} -m dualdist.compat SCRIPT"
    )
