"""Which rank is slow."""

from __future__ import annotations

from typing import Any

from ..agreement.usage import combined
from ..world.context import current
from .objects import allgather_object


def report() -> dict[str, Any]:
    """Return how the ranks have spent their time since the last call, and for which rank the others wait.

    Collective over the world, for example once an epoch.

    Returns:
        A dictionary, equal on all ranks, that JSON can hold:

        - "ranks": for each rank a dictionary with "rank", "size" (of the world), "start" (the time of the last call, in
          seconds since the epoch), "seconds" (since then), "calls" (collectives for which it has waited),
          "bytes_reduced" (that it has given to reductions; gradients before compression) and shares of the time that
          add up to 1: "data_loading" (until a DataLoader gives the next batch), "waiting" (for other ranks),
          "communication" (the wait for data that all ranks have in common) and "computing" (the rest). Waits of other
          threads than the main one do not count.
        - "slowest": the rank for which the others wait; None if the shares of waiting differ by less than 0.05.
        - "reason": what takes longer on that rank, "computing" or "data_loading"; None without such a rank.
        - "share": how much more of the time the others wait than that rank.
        - "since": the "start" of the first of the successive reports, until this one, that name the same rank.
        - "scalars": the shares of all ranks in one dictionary, for SummaryWriter.add_scalars of TensorBoard.

    Time that a GPU waits is seen only where the host waits for the GPU, as in `item()`.

    Raises HorovodInternalError as `allgather_object`, and NotInitializedError before `init()`.
    """
    context = current()
    usage = context.watch.usage
    mine = usage.take(context.backend.rank, context.backend.size)
    reports = allgather_object(mine, name="dualdist.report")
    usage.last_report = combined(reports, usage.last_report)
    return usage.last_report
