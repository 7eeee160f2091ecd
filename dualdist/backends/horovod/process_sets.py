"""Horovod's process sets: those that it has, and those that it cannot make."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

from ...errors import BackendUnavailableError
from . import gate
from .installed import real_horovod
from .repairs import CONNECTS_ALL_PROCESS_SETS, has_repair, horovods_version

with real_horovod():
    import horovod.torch as hvd

__all__ = ("can_connect", "check_process_set", "known_process_sets", "make_process_set")


def known_process_sets() -> dict[tuple[int, ...], Any]:
    """Return Horovod's process sets: the global one, and those that the script made before dualdist adopted Horovod."""
    known = {}
    for number, ranks in hvd.mpi_ops._basics._get_process_set_ids_and_ranks().items():
        known[tuple(ranks)] = hvd.ProcessSet(ranks)
        known[tuple(ranks)].process_set_id = number
    return known


def make_process_set(ranks: Sequence[int]) -> Any:
    """Have Horovod make a process set. Collective over the world. Waits without an end for a rank that is lost."""
    with gate.closed():
        made = hvd.add_process_set(list(ranks))
        hvd.barrier()  # otherwise the call fails on a slow rank when another rank leaves right after it
    return made


def check_process_set(ranks: Sequence[int], nodes: Sequence[str]) -> None:
    """Raise BackendUnavailableError if Horovod would wait without an end for a process set of `ranks`. Local.

    nodes: the host of each rank of the world. Every rank raises the same error.
    """
    version = horovods_version()
    if has_repair(CONNECTS_ALL_PROCESS_SETS, version) or hvd.mpi_enabled() or can_connect(ranks, nodes):
        return
    raise BackendUnavailableError(
        f"Horovod {version} cannot connect a process set of ranks {list(ranks)}: with its Gloo controller on several "
        "hosts, it confuses the ranks of such a set. Use a Horovod that ci/install-horovod has built, which repairs "
        "that, its MPI controller, or the torch backend."
    )


def can_connect(ranks: Sequence[int], nodes: Sequence[str]) -> bool:
    """Return whether Horovod's own Gloo controller connects a process set of `ranks`.

    A rank connects to those of the set that have its local rank in the world, and gives the connection the name of its
    local rank in the set (horovod/common/gloo/gloo_context.cc, InitializeForProcessSet). So ranks that connect to each
    other must have one name that no others have.
    """
    in_world, in_set = _local_ranks(range(len(nodes)), nodes), _local_ranks(ranks, nodes)
    names: dict[int, list[int]] = defaultdict(list)
    for rank in ranks:
        names[in_world[rank]].append(in_set[rank])
    uses = Counter(name for own in names.values() for name in own)
    return all(len(own) == 1 or own.count(own[0]) == len(own) == uses[own[0]] for own in names.values())


def _local_ranks(ranks: Sequence[int], nodes: Sequence[str]) -> dict[int, int]:
    """Return rank -> its place among those of `ranks` that are on its host."""
    counts: dict[str, int] = defaultdict(int)
    local_ranks = {}
    for rank in ranks:
        local_ranks[rank] = counts[nodes[rank]]
        counts[nodes[rank]] += 1
    return local_ranks
