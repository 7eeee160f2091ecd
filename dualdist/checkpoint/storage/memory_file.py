"""A checkpoint's bytes in memory, on their way from the disk of one rank to all ranks."""

from __future__ import annotations

import os
import warnings
from types import TracebackType
from typing import Any, NamedTuple

import torch

from ...errors import CheckpointError, DamagedCheckpointError

__all__ = ("MemoryFile", "Place")

_DESCRIPTORS = "/proc/{}/fd/{}"
"""Where a process finds the open files of another one of its user."""


class Place(NamedTuple):
    """Where the other processes of a host find a MemoryFile, while it is open."""

    process_id: int
    descriptor: int
    identity: tuple[int, int]
    """Device and inode. A process in a container of its own may know another process by this ID."""


class MemoryFile:
    """A file in memory (memfd). torch.load maps it instead of copying; loaded tensors keep the memory after closing.

    The mapping is private: a process that changes a loaded tensor changes a copy of these pages.
    """

    def __init__(self) -> None:
        self._descriptor = os.memfd_create("dualdist-checkpoint", os.MFD_CLOEXEC)

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
            view = view[written:]

    @property
    def size(self) -> int:
        """The length in bytes."""
        return os.fstat(self._descriptor).st_size

    @property
    def place(self) -> Place:
        """Where the other processes of this host find the file."""
        status = os.fstat(self._descriptor)
        return Place(os.getpid(), self._descriptor, (status.st_dev, status.st_ino))

    def become(self, place: Place) -> bool:
        """Use the file at `place`, of another process of this host, in place of this one. It must not be written here.

        Returns False, without a change, if this process cannot open it.
        """
        try:
            opened = os.open(
                _DESCRIPTORS.format(place.process_id, place.descriptor), os.O_RDONLY | os.O_CLOEXEC
            )
        except OSError:
            return False
        status = os.fstat(opened)
        if (status.st_dev, status.st_ino) != place.identity:
            os.close(opened)
            return False
        os.close(self._descriptor)
        self._descriptor = opened
        return True

    def clear(self) -> None:
        """Remove all bytes. No tensor that was loaded from them may be in use."""
        os.lseek(self._descriptor, 0, os.SEEK_SET)
        os.ftruncate(self._descriptor, 0)

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
