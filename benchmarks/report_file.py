"""The file of `--json`: figures, and the machine and versions with which they were measured."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

__all__ = ("write_report",)

_PACKAGES = ("torch", "torchvision", "horovod", "mpi4py", "accelerate", "pytorch-ignite", "lightning", "numpy")


def write_report(file: Path, figures: Mapping[str, Any]) -> None:
    """Write `figures` to `file`, which is complete at any time."""
    machine = {"processor": platform.machine(), "system": platform.platform(), "cpus": len(os.sched_getaffinity(0))}
    versions = {"python": platform.python_version()} | {name: _version(name) for name in _PACKAGES}
    written = file.with_name(f"{file.name}.new")
    written.write_text(json.dumps({"machine": machine, "versions": versions, **figures}, indent=2) + "\n")
    written.replace(file)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
