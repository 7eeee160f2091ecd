"""The ranks meet through a file, as init_method="file:///path" of torch.distributed asks for."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from .core.meeting import PublishedBoard
from .core.types import Launch
from .errors import ConfigurationError

_LONGEST = 1 << 20
"""How many characters of a file are read: more than an address has."""


class FileBoard(PublishedBoard):
    """A file that belongs to this user and has one line."""

    def __init__(self, launch: Launch, env: Mapping[str, str], path: Path) -> None:
        super().__init__(launch, env)
        self._path = path

    def write(self, text: str) -> None:
        self.read(0.0)
        with open(self._descriptor(os.O_WRONLY | os.O_TRUNC), "w") as file:
            file.write(f"{text}\n")

    def read(self, seconds: float) -> str | None:
        with open(self._descriptor(os.O_RDONLY), errors="replace") as file:
            text = file.read(_LONGEST)
        if text not in ("", "[") and not text.startswith('["'):  # no address, and no first part of one
            raise ConfigurationError(
                f"{self._path} must be a new file, or one that an earlier start has left, but has other content. "
                "Choose another file."
            )
        return text if text.endswith("\n") else None

    def clear(self) -> None:
        self._path.unlink(missing_ok=True)

    def _descriptor(self, mode: int) -> int:
        # On NFS, only opening it with O_CREAT shows at once whether another host has made it.
        descriptor = os.open(self._path, mode | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        if os.fstat(descriptor).st_uid != os.getuid():
            os.close(descriptor)
            raise ConfigurationError(
                f"{self._path} must be a file of this user, but is not. Remove it, or choose another file."
            )
        return descriptor
