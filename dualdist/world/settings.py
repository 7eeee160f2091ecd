"""What the user sets through environment variables."""

from __future__ import annotations

import math
from collections.abc import Mapping

from ..errors import ConfigurationError
from ..types import Settings

__all__ = ("read_settings",)


def read_settings(env: Mapping[str, str]) -> Settings:
    """Return what `env` sets. Raises ConfigurationError for a value that is not a number of seconds."""
    seconds = {}
    for field in ("stall_warn_seconds", "stall_timeout_seconds"):
        name = f"DUALDIST_{field.upper()}"
        if name in env:
            seconds[field] = _read_seconds(name, env[name])
    timeline = env.get("HOROVOD_TIMELINE", "")
    return Settings(
        **seconds,
        # Horovod's DYNAMIC means that the script will call start_timeline().
        timeline=None if timeline in ("", "DYNAMIC") else timeline,
        timeline_mark_cycles=env.get("HOROVOD_TIMELINE_MARK_CYCLES", "0") not in ("", "0"),
    )


def _read_seconds(name: str, text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < math.inf:  # also false for NaN
        raise ConfigurationError(
            f"`{name}` must be a positive, finite number of seconds, but is {text!r} instead."
        )
    return seconds
