"""A checkpoint's bytes in memory, on their way from the disk of one rank to all ranks."""

from __future__ import annotations

import os
import warnings
from types import TracebackType
from typing import Any

import torch

from ...errors import CheckpointError, DamagedCheckpointError

__all__ = ("MemoryFile",)


class MemoryFile:
    """A file in memory (memfd). torch.load maps it instead of copying; loaded tensors keep the memory after closing."""

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
        """Remove all bytes. No tensor that was loaded from them may be in use."""
        os.lseek(self._descriptor, 0, os.SEEK_SET)
        os.ftruncate(self._descriptor, 0)
        self.size = 0

    def read(self, start: int, count: int) -> bytes:
        """Return up to `count` bytes from `start`."""
        return os.pread(self._descriptor, count, start)

    def load(self, name: object) -> dict[str, Any]:
        """Return the values of the checkpoint in this file. name: of the checkpoint, for messages.

        Raises DamagedCheckpointError when it cannot be loaded without running code in it, or is no archive of torch.
        """
        try:
            with warnings.catch_warnings():
                # torch warns that it validates sparse tensors, which is what we want.
                warnings.filterwarnings("ignore", "Validating sparse tensor")
                path = f"/proc/self/fd/{self._descriptor}"
                loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except Exception as error:
            reason = " ".join(str(error).split()).partition(". ")[0][:200]
            raise DamagedCheckpointError(
                f"`path` must hold only tensors and plain values, but {name} was refused: {reason}."
            ) from error
        if not isinstance(loaded, dict):
            raise CheckpointError(
                f"`path` must hold a dictionary, but {name} holds a {type(loaded).__name__} instead."
            )
        return loaded
