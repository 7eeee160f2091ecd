"""Opens checkpoint files for reading. Only regular files: reading from a FIFO or a device may never end."""

from __future__ import annotations

import errno
import os
import stat
from typing import BinaryIO, cast

from ...errors import DamagedCheckpointError

__all__ = ("damaged", "open_checkpoint")

_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
    stat.S_IFDIR: "a folder",
}


def damaged(path: object, reason: str) -> DamagedCheckpointError:
    """Return the error for a file that is not a complete checkpoint of dualdist."""
    return DamagedCheckpointError(
        f"`path` must be a checkpoint as dualdist wrote it, but {path} is not: {reason}."
    )


def open_checkpoint(path: str | os.PathLike[str]) -> BinaryIO:
    """Open `path` for reading, without a buffer and without waiting.

    Raises DamagedCheckpointError when it is not a regular file, OSError when it cannot be opened.
    """
    return cast(BinaryIO, open(path, "rb", buffering=0, opener=_open_regular))


def _open_regular(path: str, flags: int) -> int:
    try:
        # Without O_NONBLOCK, opening a FIFO waits for a writer. It has no effect on regular files.
        descriptor = os.open(path, flags | os.O_NONBLOCK)
    except OSError as error:
        if error.errno == errno.ENXIO:  # open(2): a socket, or a device that is absent
            raise damaged(path, "it is a socket or a device, not a regular file") from error
        raise
    kind = stat.S_IFMT(os.fstat(descriptor).st_mode)
    if kind == stat.S_IFREG:
        return descriptor
    os.close(descriptor)
    raise damaged(path, f"it is {_KINDS.get(kind, 'something else')}, not a regular file")
