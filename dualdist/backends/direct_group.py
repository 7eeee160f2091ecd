"""Process groups that their members make without the other ranks, and without torch.distributed's list of groups.

torch.distributed.new_group names such a group after the number of groups that the process has made. The members of a
group would use different names if they have made different numbers of groups.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist

from .torch_group import TorchGroup, wrapped

__all__ = ("DirectGroup", "can_connect")

_KINDS = ("gloo", "mpi4py")


def can_connect(config: Mapping[str, str]) -> bool:
    """Return whether DirectGroup supports the transport of CPU tensors in `config`."""
    return config["cpu"] in _KINDS


class DirectGroup(TorchGroup):
    """A group for tensors on the CPU."""

    def __init__(
        self, kind: str, store: dist.Store, name: str, ranks: Sequence[int], rank: int, timeout: timedelta
    ) -> None:
        """Connect the members. Collective over `ranks` alone.

        store: shared by the members. name: the same on all members, and used once.
        """
        place, own_store = list(ranks).index(rank), dist.PrefixStore(name, store)
        with wrapped():
            own = (
                dist.ProcessGroupGloo(own_store, place, len(ranks), timeout)
                if kind == "gloo"
                else _mpi_group(own_store, name, place, len(ranks), timeout)
            )
        super().__init__(ranks, rank, own, frozenset({"cpu"}), None)

    def set_timeout(self, timeout: timedelta) -> None:
        if self._pg is not None:
            # Gloo has only the private method in older releases of torch.
            setter = getattr(self._pg, "set_timeout", None) or self._pg._set_default_timeout
            setter(timeout)

    def close(self) -> None:
        pg, self._pg = self._pg, None
        if pg is not None:
            pg.shutdown()


def _mpi_group(store: dist.Store, name: str, place: int, size: int, timeout: timedelta) -> Any:
    from . import mpi

    options = cast(Any, torch._C._distributed_c10d)._DistributedBackendOptions()
    options.store, options.group_id, options.timeout = store, name, timeout
    options.group_rank, options.group_size = place, size
    return mpi.create(options)
