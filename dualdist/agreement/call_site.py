"""The line of the user's code that makes a call."""

from __future__ import annotations

import functools
import os
import sys
import warnings
from pathlib import Path
from types import FrameType

__all__ = ("call_site", "warn_deprecated")

_OURS = str(Path(__file__).resolve().parents[1]) + os.sep
_TORCH = f"{os.sep}site-packages{os.sep}torch{os.sep}"


def call_site() -> tuple[str, int]:
    """Return (file, line) of the innermost frame outside dualdist and torch."""
    frame = _user_frame()
    return frame.f_code.co_filename, frame.f_lineno


def warn_deprecated(message: str) -> None:
    """Issue a DeprecationWarning for the user's line (see `call_site`), in the user's module.

    Python shows a DeprecationWarning by default only if it belongs to `__main__`. `warnings.warn` cannot do this: it
    needs the number of frames between this function and the user's line, which differs between the public functions.
    """
    frame = _user_frame()
    warnings.warn_explicit(
        message,
        DeprecationWarning,
        frame.f_code.co_filename,
        frame.f_lineno,
        module=frame.f_globals.get("__name__"),
        registry=frame.f_globals.setdefault("__warningregistry__", {}),
    )


def _user_frame() -> FrameType:
    frame = sys._getframe(1)
    while _is_internal(frame.f_code.co_filename) and frame.f_back is not None:
        frame = frame.f_back
    return frame


@functools.cache
def _is_internal(file: str) -> bool:
    return (
        file.startswith(_OURS)
        or _TORCH in file
        or file.endswith(f"{os.sep}contextlib.py")
        or file.startswith("<")
    )
