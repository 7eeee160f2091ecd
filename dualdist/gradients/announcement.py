"""What the ranks report to each other at the end of a backward, while their gradients are being sent."""

from __future__ import annotations

from ..agreement import call_kinds
from ..agreement.call import Call
from ..agreement.call_site import call_site
from ..agreement.verdict import Verdict
from ..backends.base import Group
from ..errors import HorovodInternalError
from ..world.process_sets import ProcessSet, channel_of

__all__ = ("announce", "announcement")


def announcement(
    process_set: ProcessSet, grad_sync: int, buckets_sent: int = 0, *, is_wrong: bool = False
) -> Call:
    """Return the call that announces a reduction of gradients, at the user's line.

    Args:
        grad_sync: the ID of the reducer in the process set.
        buckets_sent: how many buckets this rank has sent since the reducer entered the world.
        is_wrong: whether this rank cannot use the gradients.
    """
    return Call(
        call_kinds.GRADIENTS,
        (("process_set", process_set.process_set_id), ("grad_sync", grad_sync)),
        site=call_site(),
        count=buckets_sent,
        flag=is_wrong,
    )


def announce(process_set: ProcessSet, call: Call) -> list[int]:
    """Return the ranks on which something is wrong. Collective over the process set. call: an `announcement`.

    Gradients are matched by the order in which they are sent. If a backward fails on one rank, or one rank repeats
    it alone, that rank is therefore out of step until the next shutdown() and init().

    Raises:
        CollectiveMismatchError: a rank called something else.
        HorovodInternalError: the ranks are out of step.
    """
    return channel_of(process_set).run(call, _compare)


def _compare(group: Group, verdict: Verdict) -> list[int]:
    active = [place for place in range(group.size) if place not in verdict.joined]
    if len({verdict.counts[place] for place in active}) > 1:
        sent = ", ".join(f"rank {group.ranks[place]}: {verdict.counts[place]}" for place in active)
        raise HorovodInternalError(
            "the ranks have not sent the same number of gradient buckets, because a backward failed or was repeated on "
            f"some ranks only (sent until now: {sent})"
        )
    return [group.ranks[place] for place in active if verdict.flags[place]]
