"""What the ranks tell each other at the end of a backward, while their gradients are under way already."""

from __future__ import annotations

from ..agreement.call_site import call_site
from ..agreement.verdict import Verdict
from ..backends.base import Group
from ..errors import HorovodInternalError
from ..types import Call
from ..world.process_sets import ProcessSet, channel_of

__all__ = ("announce",)


def announce(process_set: ProcessSet, grad_sync: int, buckets_sent: int, *, is_wrong: bool) -> list[int]:
    """Return the ranks on which something is wrong. Collective over the process set.

    grad_sync: which one combines its gradients. buckets_sent: by this rank since the world was joined. Gradients are
    matched by the order in which they are sent, so a rank that gives up a backward, or repeats it alone, is out of step
    for good.

    Raises CollectiveMismatchError when a rank does something else, HorovodInternalError when ranks are out of step.
    """
    call = Call(
        "gradient synchronization",
        (("process_set", process_set.process_set_id), ("grad_sync", grad_sync)),
        site=call_site(),
        extra=2 * buckets_sent + is_wrong,
        joinable=True,
        under_way=True,
    )
    return channel_of(process_set).run(call, _compare)


def _compare(group: Group, verdict: Verdict) -> list[int]:
    if verdict.extras[0] % 2 == 0 and len(set(verdict.extras)) == 1:
        return []
    told = {
        group.ranks[place]: extra for place, extra in enumerate(verdict.extras) if place not in verdict.joined
    }
    if len({extra // 2 for extra in told.values()}) > 1:
        sent = ", ".join(f"rank {rank}: {extra // 2}" for rank, extra in told.items())
        raise HorovodInternalError(
            "the ranks have not sent the same buckets of gradients, since some have given up a backward, or repeated "
            f"one alone (sent until now: {sent})"
        )
    return [rank for rank, extra in told.items() if extra % 2]
