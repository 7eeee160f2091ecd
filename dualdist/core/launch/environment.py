"""The environment variables of processes: what `init` reads there, and the settings of users."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator, Mapping

from ...errors import ConfigurationError
from ..extensions import extension
from ..types import NEVER_SECONDS, Settings

SECRET = "DUALDIST_SECRET"


def secret_in(env: Mapping[str, str]) -> bytes:
    """Return the job's secret. Raises ConfigurationError when DUALDIST_SECRET is not hexadecimal."""
    try:
        return bytes.fromhex(env.get(SECRET, ""))
    except ValueError:
        raise ConfigurationError(
            f"`{SECRET}` must be hexadecimal digits, but is not. Make one with `openssl rand -hex 32`."
        ) from None


def without_copies(env: Mapping[str, str]) -> dict[str, str]:
    """Return `env` without what dualdist has set for other programs (copies.py)."""
    copies = extension("copies") if "DUALDIST_COPIES" in env else None
    hidden = () if copies is None else copies.names_of_copies(env)
    return {name: value for name, value in env.items() if name not in hidden}


@contextlib.contextmanager
def temporary_environment(variables: Mapping[str, str | None]) -> Iterator[None]:
    """Set `variables` (None: unset) in the `with` block, for C++ that reads them, then restore the old values."""
    before = {name: os.environ.get(name) for name in variables}
    _set(variables)
    try:
        yield
    finally:
        _set(before)


def _set(variables: Mapping[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


# What the user sets through environment variables.


def read_settings(env: Mapping[str, str]) -> Settings:
    """Return what `env` sets. Raises ConfigurationError for a value that is not a number as it must be."""
    warn = _stall_seconds(env, "DUALDIST_STALL_WARN_SECONDS", "HOROVOD_STALL_CHECK_TIME_SECONDS")
    timeout = _stall_seconds(env, "DUALDIST_STALL_TIMEOUT_SECONDS", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS")
    return Settings(
        warn or Settings.stall_warn_seconds,
        timeout or Settings.stall_timeout_seconds,
        number_in(env, "DUALDIST_START_TIMEOUT_SECONDS", Settings.start_timeout_seconds),
        env,
    )


def _stall_seconds(env: Mapping[str, str], name: str, horovods: str) -> float:
    """Return the value of `name`, else that of Horovod's variable `horovods`, else 0.

    Horovod's values are those of horovod/common/utils/env_parser.cc:120. Its shutdown time is 0 for never.
    """
    if name in env:
        return number_in(env, name)
    if is_on(env, "HOROVOD_STALL_CHECK_DISABLE"):
        return NEVER_SECONDS
    return number_in(env, horovods, rule="non-negative") if env.get(horovods) else 0.0


def is_on(env: Mapping[str, str], name: str, default: bool = False) -> bool:
    """Return whether the variable `name` is not 0. If it is empty or absent, return `default`."""
    return env[name] != "0" if env.get(name) else default


def number_in(
    env: Mapping[str, str],
    name: str,
    default: float = math.nan,
    rule: str = "positive",
    unit: str = "seconds",
    most: float = 1e308,
) -> float:
    """Return the number in the variable `name`, else `default`. Raises ConfigurationError if it breaks `rule`."""
    text = env.get(name, default)
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    is_number = 0 <= number <= most  # false for NaN
    if not is_number or (number == 0 and rule == "positive"):
        raise ConfigurationError(f"`{name}` must be a {rule}, finite number of {unit}, but is {text!r} instead.")
    return number
