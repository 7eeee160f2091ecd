"""The line of the user's code that makes a call."""

from __future__ import annotations

import functools
import os
import sys
import warnings
from pathlib import Path
from types import FrameType

__all__ = ("call_site", "remember_call_site", "warn_deprecated")

_OURS = str(Path(__file__).resolve().parents[1]) + os.sep
_TORCH = f"{os.sep}site-packages{os.sep}torch{os.sep}"

_remembered: list[tuple[str, int]] = []
"""At most one (file, line)."""


def call_site() -> tuple[str, int]:
    """Return (file, line) of the innermost frame outside dualdist and torch.

    In a thread without one, return what `remember_call_site` has found: autograd runs the hooks and the backward
    functions of a GPU in threads of its own (torch/csrc/autograd/engine.cpp, Engine::start_device_threads).
    """
    frame = _user_frame()
    if _remembered and _is_internal(frame.f_code.co_filename):
        return _remembered[0]
    return frame.f_code.co_filename, frame.f_lineno


def remember_call_site() -> None:
    """Remember the user's line, which is near the next call of `backward`."""
    frame = _user_frame()
    _remembered[:] = [(frame.f_code.co_filename, frame.f_lineno)]


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
