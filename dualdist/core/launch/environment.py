"""The environment variables of processes: a launcher's, those that dualdist sets, and the settings of users.

`dualdist run` and `spawn` give their processes their place in the job. Beside it, they, `init` and dualdist.compat set
copies of it for scripts that do not use dualdist: the variables of torchrun and horovodrun. Copies are recorded in
DUALDIST_COPIES, and launch detection ignores them as long as they have the recorded values. A launcher that such a
process starts sets others, and is detected.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator, Mapping, MutableMapping, Sequence

from ...errors import ConfigurationError
from ..types import NEVER_SECONDS, Settings, World

COPIES = "DUALDIST_COPIES"
"""The variable with the copies as NAME=VALUE, separated by spaces."""
RENDEZVOUS, SECRET = "DUALDIST_RENDEZVOUS", "DUALDIST_SECRET"


def secret_in(env: Mapping[str, str]) -> bytes:
    """Return the job's secret. Raises ConfigurationError when DUALDIST_SECRET is not hexadecimal."""
    try:
        return bytes.fromhex(env.get(SECRET, ""))
    except ValueError:
        raise ConfigurationError(
            f"`{SECRET}` must be hexadecimal digits, but is not. Make one with `openssl rand -hex 32`."
        ) from None


# Copies for scripts that do not use dualdist.

RUN_ID = "TORCHELASTIC_RUN_ID"
OF_LAUNCHER = "dualdist-"
"""The start of the run ID of `dualdist run` and `spawn`."""
_PLACE = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
"""The variables of torchrun that detect.py and meeting/ read."""


def torchrun_variables(world: World, nodes: Sequence[str], master: tuple[str, int]) -> dict[str, str]:
    """Return torchrun's variables for the place of one process. nodes: of each rank. master: MASTER_ADDR and _PORT."""
    order = list(dict.fromkeys(nodes))
    address, port = master
    found = {
        "RANK": world.rank,
        "WORLD_SIZE": world.size,
        "LOCAL_RANK": world.local_rank,
        "LOCAL_WORLD_SIZE": world.local_size,
        "MASTER_ADDR": address,
        "MASTER_PORT": port,
        "GROUP_RANK": order.index(nodes[world.rank]),
        "GROUP_WORLD_SIZE": len(order),
        "ROLE_RANK": world.rank,
        "ROLE_WORLD_SIZE": world.size,
        "ROLE_NAME": "default",
    }
    return {name: str(value) for name, value in found.items()}


def agent_variables(run_id: str, env: Mapping[str, str]) -> dict[str, str]:
    """Return what torchrun sets beside `torchrun_variables` (torch/distributed/elastic/agent/server/
    local_elastic_agent.py), except settings that `env` has. run_id: the same text for all processes of a job.

    The script itself serves the store at MASTER_ADDR. Programs such as Lightning recognise torchrun by the run ID.
    """
    found = {
        RUN_ID: run_id,
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }
    if not env.get("TORCH_NCCL_ASYNC_ERROR_HANDLING"):
        found["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "1"
    return found


def add_copies(variables: Mapping[str, str], env: MutableMapping[str, str]) -> None:
    """Set `variables` in `env`, and record them as copies."""
    env.update(variables)
    _record({**_recorded(env), **variables}, env)


def remove_copies(variables: Mapping[str, str], env: MutableMapping[str, str]) -> None:
    """Undo `add_copies`, except where a value has changed since."""
    _record({name: value for name, value in _recorded(env).items() if name not in variables}, env)
    for name in [name for name, value in variables.items() if env.get(name) == value]:
        del env[name]


def _recorded(env: Mapping[str, str]) -> dict[str, str]:
    return dict(item.split("=", 1) for item in env.get(COPIES, "").split() if "=" in item)


def _record(copies: Mapping[str, str], env: MutableMapping[str, str]) -> None:
    env[COPIES] = " ".join(f"{name}={value}" for name, value in copies.items())
    if not copies:
        del env[COPIES]


def names_of_copies(env: Mapping[str, str]) -> set[str]:
    """Return the names of the variables in `env` that are copies.

    If torchrun's run ID or the port of Horovod's rendezvous is no longer the same, or absent as before, another
    launcher has set the variables of that kind. Otherwise the script may have changed some of torchrun's; those in
    `_PLACE` count only together. dualdist.compat updates Horovod's numbers.
    """
    recorded = _recorded(env)
    horovod = {name for name in recorded if name.startswith("HOROVOD_")}
    torch = {name for name in recorded.keys() - horovod if env.get(name) == recorded[name]}
    if env.get(RUN_ID) != recorded.get(RUN_ID):
        torch = set()
    elif not _PLACE & recorded.keys() <= torch:
        torch -= _PLACE
    port = "HOROVOD_GLOO_RENDEZVOUS_PORT"
    return torch | (horovod if env.get(port) == recorded.get(port) else set())


def without_copies(env: Mapping[str, str]) -> dict[str, str]:
    """Return `env` without the variables that are copies."""
    copies = names_of_copies(env)
    return {name: value for name, value in env.items() if name not in copies}


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
        raise ConfigurationError(
            f"`{name}` must be a {rule}, finite number of {unit}, but is {text!r} instead."
        )
    return number
