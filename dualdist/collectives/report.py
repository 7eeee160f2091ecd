"""Which rank is slow."""

from __future__ import annotations

from typing import Any

from ..agreement.usage import combined
from ..world.context import current
from .objects import allgather_object


def report() -> dict[str, Any]:
    """Return how the ranks have spent their time since the last call, and for which rank the others wait.

    Collective over the world, for example once an epoch. The first call starts to measure the loading of data, so its
    own result has none; DUALDIST_SUMMARY=1 measures it from `init()` on.

    Returns:
        A dictionary, equal on all ranks, that JSON can hold:

        - "ranks": for each rank a dictionary with "rank", "size" (of the world), "seconds" (since the last call),
          "calls" (collectives for which it has waited) and shares of the time that add up to 1: "data_loading" (until
          a DataLoader gives the next batch), "waiting" (for other ranks), "communication" (the wait for data that all
          ranks have in common) and "computing" (the rest). Waits of other threads than the main one do not count.
        - "slowest": the rank for which the others wait; None if the shares of waiting differ by less than 0.05.
        - "reason": what takes longer on that rank, "computing" or "data_loading"; None without such a rank.
        - "share": how much more of the time the others wait than that rank.

    Time that a GPU waits is seen only where the host waits for the GPU, as in `item()`.

    Raises HorovodInternalError as `allgather_object`, and NotInitializedError before `init()`.
    """
    context = current()
    context.watch.usage.measure_loading()
    mine = context.watch.usage.take(context.backend.rank, context.backend.size)
    return combined(allgather_object(mine, name="dualdist.report"))
