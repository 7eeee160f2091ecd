"""What the user sets through environment variables."""

from __future__ import annotations

import math
from collections.abc import Mapping

from ..errors import ConfigurationError
from ..types import NEVER_SECONDS, Settings


def read_settings(env: Mapping[str, str]) -> Settings:
    """Return what `env` sets. Raises ConfigurationError for a value that is not a number of seconds."""
    warn = _stall_seconds(env, "DUALDIST_STALL_WARN_SECONDS", "HOROVOD_STALL_CHECK_TIME_SECONDS")
    timeout = _stall_seconds(env, "DUALDIST_STALL_TIMEOUT_SECONDS", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS")
    start = "DUALDIST_START_TIMEOUT_SECONDS"
    timeline = env.get("HOROVOD_TIMELINE", "")
    return Settings(
        stall_warn_seconds=warn or Settings.stall_warn_seconds,
        stall_timeout_seconds=timeout or Settings.stall_timeout_seconds,
        start_timeout_seconds=(
            _read_seconds(start, env[start], "positive") if start in env else Settings.start_timeout_seconds
        ),
        shared_memory=env.get("DUALDIST_SHARED_MEMORY", "1") != "0",
        compare_start=env.get("DUALDIST_COMPARE_START", "1") != "0",
        # Horovod's DYNAMIC means that the script will call start_timeline().
        timeline=None if timeline in ("", "DYNAMIC") else timeline,
        timeline_mark_cycles=env.get("HOROVOD_TIMELINE_MARK_CYCLES", "0") not in ("", "0"),
    )


def _stall_seconds(env: Mapping[str, str], name: str, horovods: str) -> float:
    """Return the value of `name`, else that of Horovod's variable `horovods`, else 0.

    Horovod's values are those of horovod/common/utils/env_parser.cc:120. Its shutdown time is 0 for never.
    """
    if name in env:
        return _read_seconds(name, env[name], "positive")
    if env.get("HOROVOD_STALL_CHECK_DISABLE", "0") not in ("", "0"):
        return NEVER_SECONDS
    return _read_seconds(horovods, env[horovods], "non-negative") if env.get(horovods) else 0.0


def _read_seconds(name: str, text: str, rule: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    is_number = 0 <= seconds < math.inf  # false for NaN
    if not is_number or (seconds == 0 and rule == "positive"):
        raise ConfigurationError(
            f"`{name}` must be a {rule}, finite number of seconds, but is {text!r} instead."
        )
    return seconds
