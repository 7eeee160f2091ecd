"""Checks of arguments that several functions of this package share."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from typing import Any

from ..checks import converted, flag, instance, integer, items, mapping, text, wrong
from .storage.filesystem import FileSystem

__all__ = ("check_file_system", "check_signals", "checked_metrics", "checked_strict")

_NOT_HANDLED = (signal.SIGKILL, signal.SIGSTOP)
"""Signals for which the system allows no handler."""


def checked_strict(strict: Any) -> bool:
    """Return `strict` as a bool."""
    return flag("strict", strict)


def checked_metrics(metrics: Any) -> Mapping[str, float]:
    """Return `metrics` with its values as floats, which may be NaN; None: no metrics."""
    fix = 'Pass a dictionary, such as {"accuracy": 0.9}.'
    checked = {}
    for name, value in mapping("metrics", {} if metrics is None else metrics, fix=fix).items():
        text("metrics", name, fix)
        place = f"metrics[{name!r}]"
        checked[name] = converted(
            place, value, float, "a number", "Pass a float.", without=bool | str | bytes
        )
    return checked


def check_file_system(file_system: Any) -> None:
    """Raise TypeError unless `file_system` is a FileSystem or None."""
    instance("file_system", file_system, (FileSystem, type(None)), "a FileSystem or None")


def check_signals(signals: Any) -> None:
    """Raise TypeError or ValueError unless a handler can be installed for each of `signals`."""
    fix = "Pass signals such as (signal.SIGTERM,), or ()."
    for place, number in enumerate(items("signals", signals, "a list of signals", fix)):
        name = f"signals[{place}]"
        if integer(name, number, fix=fix) not in signal.valid_signals() or number in _NOT_HANDLED:
            raise wrong(name, "a signal that can be handled", int(number), fix)
