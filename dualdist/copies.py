"""The place of a process once more, for scripts that do not use dualdist: in the variables of torchrun and horovodrun.

`init` and dualdist.compat set such copies, and so do `dualdist run`, `exec` and `spawn`. They are recorded in
DUALDIST_COPIES, and launch detection ignores them as long as they have the recorded values. A launcher that such a
process starts sets others, and is detected.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, MutableMapping, Sequence

from .core.types import World

COPIES = "DUALDIST_COPIES"
"""The variable with the copies as NAME=VALUE, separated by spaces."""
RUN_ID = "TORCHELASTIC_RUN_ID"
OF_LAUNCHER = "dualdist-"
"""The start of the run ID of `dualdist run` and `spawn`."""
_PLACE = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
"""The variables of torchrun that core/launch/ and core/meeting/ read."""


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


def copied_variables(*groups: Mapping[str, str], given: Mapping[str, str]) -> dict[str, str]:
    """Return `groups` of variables, one for each launcher, and DUALDIST_COPIES.

    given: variables that the user has set for the processes. A group with one of them is left out: it would contradict.
    """
    copies: dict[str, str] = {}
    for group in groups:
        if given.keys().isdisjoint(group):
            add_copies(group, copies)
    return copies


def remove_copies(variables: Mapping[str, str], env: MutableMapping[str, str]) -> None:
    """Undo `add_copies`, except where a value has changed since."""
    _record({name: value for name, value in _recorded(env).items() if name not in variables}, env)
    for name in [name for name, value in variables.items() if env.get(name) == value]:
        del env[name]


def remove_all_copies(env: MutableMapping[str, str]) -> None:
    """Remove the copies whose values have not changed since, for a launcher that is started with `env`."""
    remove_copies(_recorded(env), env)


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


@contextlib.contextmanager
def exported(world: World, nodes: Sequence[str], master: tuple[str, int]) -> Iterator[None]:
    """Set those of `torchrun_variables` that are absent or empty, in the `with` block.

    For frameworks and scripts that look for them. Users often export MASTER_* alone.
    """
    variables = torchrun_variables(world, nodes, master)
    added = {name: value for name, value in variables.items() if not os.environ.get(name)}
    add_copies(added, os.environ)
    try:
        yield
    finally:
        remove_copies(added, os.environ)
