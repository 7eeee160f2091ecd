"""The line of the user's code that a call comes from."""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path

__all__ = ("call_site",)

_OURS = str(Path(__file__).resolve().parents[1]) + os.sep
_TORCH = f"{os.sep}site-packages{os.sep}torch{os.sep}"


def call_site() -> tuple[str, int]:
    """Return (file, line) of the innermost frame outside dualdist and torch."""
    frame = sys._getframe(1)
    while _passed_over(frame.f_code.co_filename) and frame.f_back is not None:
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


@functools.cache
def _passed_over(file: str) -> bool:
    return (
        file.startswith(_OURS)
        or _TORCH in file
        or file.endswith(f"{os.sep}contextlib.py")
        or file.startswith("<")
    )
