"""A file in memory: how a checkpoint comes from the rank that sees the disk to those that do not."""

from __future__ import annotations

import os
import warnings
from types import TracebackType
from typing import Any

import torch

from ...errors import CheckpointError, DamagedCheckpointError

__all__ = ("MemoryFile",)


class MemoryFile:
    """Bytes that torch.load maps instead of copying; tensors that were loaded keep them alive after `close`."""

    def __init__(self) -> None:
        self._descriptor = os.memfd_create("dualdist-checkpoint", os.MFD_CLOEXEC)
        self.size = 0

    def __enter__(self) -> MemoryFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._descriptor)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Append `data`."""
        view = memoryview(data)
        while view:
            written = os.write(self._descriptor, view)
            self.size += written
            view = view[written:]

    def clear(self) -> None:
        """Forget everything. Nothing may have been loaded and kept."""
        os.lseek(self._descriptor, 0, os.SEEK_SET)
        os.ftruncate(self._descriptor, 0)
        self.size = 0

    def read(self, start: int, count: int) -> bytes:
        """Return up to `count` bytes from `start`."""
        return os.pread(self._descriptor, count, start)

    def load(self, name: object) -> dict[str, Any]:
        """Return what the checkpoint `name` holds, as it was saved.

        Raises DamagedCheckpointError when it holds what only running code could make, or is no archive of torch.
        """
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Validating sparse tensor")  # which we want
                path = f"/proc/self/fd/{self._descriptor}"
                loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except Exception as error:
            reason = " ".join(str(error).split()).partition(". ")[0][:200]
            raise DamagedCheckpointError(
                f"`path` must hold tensors and plain values alone, but {name} was refused: {reason}."
            ) from error
        if not isinstance(loaded, dict):
            raise CheckpointError(
                f"`path` must hold a dictionary, but {name} holds a {type(loaded).__name__} instead."
            )
        return loaded
