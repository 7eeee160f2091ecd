"""Variables for scripts that do not use dualdist: those of torchrun and horovodrun, set beside dualdist's own.

`dualdist run` and `spawn` set them, and record them in DUALDIST_COPIES. Launch detection ignores them as long as they
have the recorded values. A launcher that such a process starts sets others, and is detected.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..types import World

__all__ = ("COPIES", "copied_variables", "names_of_copies", "without_copies")

COPIES = "DUALDIST_COPIES"
"""The variable with the copies as NAME=VALUE, separated by spaces."""

_HOROVOD, _PORT = "HOROVOD_", "HOROVOD_GLOO_RENDEZVOUS_PORT"


def copied_variables(
    world: World,
    *,
    host: str,
    master: tuple[str, int],
    rendezvous: tuple[str, int] | None,
    interface: str | None,
    given: Mapping[str, str],
) -> dict[str, str]:
    """Return the variables of torchrun and of horovodrun for one process, and DUALDIST_COPIES.

    host: a name of the process's node. master: MASTER_ADDR and MASTER_PORT. rendezvous: address of the HTTP server at
    which Horovod's Gloo controllers meet (horovod/common/gloo/gloo_context.cc:134-170); None if there is none.
    interface: the network interface of Horovod's Gloo; None if the process's host finds it. given: variables
    that the user has set for the processes. A copy never replaces them.
    """
    horovod = {f"{_HOROVOD}{name.upper()}": getattr(world, name) for name in World.__dataclass_fields__}
    if rendezvous is not None:
        horovod |= {
            "HOROVOD_CONTROLLER": "gloo",
            # Otherwise a Horovod that was built with MPI starts MPI.
            "HOROVOD_CPU_OPERATIONS": "gloo",
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": rendezvous[0],
            _PORT: rendezvous[1],
            "HOROVOD_HOSTNAME": host,
        }
        horovod |= {} if interface is None else {"HOROVOD_GLOO_IFACE": interface}
    torch = {
        "RANK": world.rank,
        "WORLD_SIZE": world.size,
        "LOCAL_RANK": world.local_rank,
        "LOCAL_WORLD_SIZE": world.local_size,
        "MASTER_ADDR": master[0],
        "MASTER_PORT": master[1],
    }
    # Part of a group would contradict the rest that the user has set.
    kept = [group for group in (torch, horovod) if given.keys().isdisjoint(group)]
    copies = {name: str(value) for group in kept for name, value in group.items()}
    return {**copies, COPIES: " ".join(f"{name}={value}" for name, value in copies.items())}


def names_of_copies(env: Mapping[str, str]) -> set[str]:
    """Return the names of the variables in `env` that are copies.

    The copies of one launcher count only together: if one has changed, another launcher or the script has set them. Of
    Horovod's only the port must be the same, because dualdist.compat updates the numbers.
    """
    recorded = dict(item.split("=", 1) for item in env.get(COPIES, "").split() if "=" in item)
    groups = (
        {name for name in recorded if name.startswith(_HOROVOD)},
        {name for name in recorded if not name.startswith(_HOROVOD)},
    )
    unchanged = [
        group for group in groups if all(env.get(name) == recorded[name] for name in group & {_PORT} or group)
    ]
    return set().union(*unchanged)


def without_copies(env: Mapping[str, str]) -> dict[str, str]:
    """Return `env` without the variables that are copies."""
    copies = names_of_copies(env)
    return {name: value for name, value in env.items() if name not in copies}
