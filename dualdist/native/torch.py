"""torch.distributed as dualdist has started it: its process groups, and torch's own DistributedDataParallel.

dualdist itself sends nothing on these groups, so its calls and the script's cannot get mixed up.
"""

from __future__ import annotations

from typing import cast

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ..core.world.context import current
from ..core.world.process_sets import ProcessSet, checked_process_set, global_process_set
from ..errors import BackendUnavailableError

__all__ = ("DistributedDataParallel", "process_group")


def process_group(process_set: ProcessSet = global_process_set) -> dist.ProcessGroup:
    """Return a process group of torch.distributed over the ranks of `process_set`.

    For the whole world it is torch's default group. Collective over the world for another set: each call makes a new
    group, and ranks outside the set get torch.distributed.GroupMember.NON_GROUP_MEMBER.

    Raises BackendUnavailableError in a script of Horovod under dualdist.compat, which has no default group,
    NotInitializedError before `init()`, and TypeError for the set of a communicator that is not registered.
    """
    current()
    if not dist.is_initialized():
        raise BackendUnavailableError(
            "torch.distributed has no default process group, as under Horovod: dualdist.compat runs this script. Call "
            "torch.distributed.init_process_group, or import dualdist and start without dualdist.compat."
        )
    if process_set is global_process_set:
        return cast(dist.ProcessGroup, dist.group.WORLD)
    if process_set.ranks is None:  # torch would take all ranks
        checked_process_set(process_set, registered=True)
    return cast(dist.ProcessGroup, dist.new_group(process_set.ranks))
