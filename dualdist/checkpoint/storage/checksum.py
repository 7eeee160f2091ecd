"""The checksum of a checkpoint: the CRC-32 of all bytes before the file's last line, which holds it in text."""

from __future__ import annotations

import zlib

__all__ = ("LINE_BYTES", "PIECE_BYTES", "Checksum")

LINE_BYTES = len(b"crc32 00000000\n")
PIECE_BYTES = 1 << 20
"""Files are summed and written (or read) in pieces of this size, so that the second step finds a piece in the cache."""


class Checksum:
    """The CRC-32 of all bytes that were added so far. It detects accidental damage, not tampering."""

    def __init__(self) -> None:
        self._crc = 0

    def add(self, data: bytes | memoryview) -> None:
        """Include `data`."""
        self._crc = zlib.crc32(data, self._crc)

    def line(self) -> bytes:
        """Return the line of LINE_BYTES bytes that ends a checkpoint."""
        return f"crc32 {self._crc:08x}\n".encode()
