"""What the ranks report to each other at the end of a backward, while their gradients are being sent.

It travels from host to host. Nothing that the ranks must know of each other's gradients is read from a GPU.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from ..agreement import call_kinds
from ..agreement.call import Call
from ..agreement.call_site import call_site
from ..agreement.verdict import Verdict
from ..backends.base import Group
from ..errors import HorovodInternalError
from ..world.process_sets import ProcessSet, channel_of
from .contributions import Contributions

__all__ = ("announce", "announcement", "next_digest", "settle")


def announcement(
    process_set: ProcessSet,
    grad_sync: int,
    *,
    changed: bool = False,
    is_wrong: bool = False,
) -> Call:
    """Return the call that announces a reduction of gradients, at the user's line.

    Args:
        grad_sync: the ID of the reducer in the process set.
        changed: whether this rank contributes other kinds of gradients than before, see `Contributions.changed`.
        is_wrong: whether this rank cannot use the gradients.
    """
    return Call(
        call_kinds.GRADIENTS,
        (("process_set", process_set.process_set_id), ("grad_sync", grad_sync)),
        site=call_site(),
        count=2 * channel_of(process_set).gradients_sent + changed,
        flag=is_wrong,
    )


def next_digest(digest: int, grad_sync: int, place: int) -> int:
    """Return the digest of the buckets sent, after that at `place` of a reducer; see Channel.gradients_sent."""
    return (digest * 1_000_003 + (grad_sync << 20) + place + 1) % (1 << 60)


def announce(
    process_set: ProcessSet, call: Call, contributions: Contributions, kinds: Sequence[bytes]
) -> list[int]:
    """Return the ranks on which something is wrong; if there are none, bring `contributions` up to date.

    Collective over the process set. call: an `announcement`. kinds: what this rank contributes to each bucket.

    Gradients are matched by the order in which they are sent. If a backward fails on one rank, or one rank repeats
    it alone, that rank is therefore out of step until the next shutdown() and init().

    Raises:
        CollectiveMismatchError: a rank called something else.
        HorovodInternalError: the ranks are out of step.
    """
    return channel_of(process_set).ahead.end_step(call, functools.partial(settle, contributions, kinds))


def settle(
    contributions: Contributions, kinds: Sequence[bytes] | None, group: Group, verdict: Verdict
) -> list[int]:
    """Do what `announce` does after the agreement. kinds: None on a rank that has joined."""
    active = [place for place in range(group.size) if place not in verdict.joined]
    if len({verdict.counts[place] >> 1 for place in active}) > 1:
        raise HorovodInternalError(
            "the ranks have not sent the same number of gradient buckets, or not in the same order, because a backward "
            "failed or was repeated on some ranks only, or gave several optimizers their gradients in another order"
        )
    wrong = [group.ranks[place] for place in active if verdict.flags[place]]
    any_changed = any(verdict.counts[place] & 1 for place in active)
    if not wrong and contributions.must_exchange(any_changed, bool(verdict.joined)):
        contributions.exchange(group, kinds)
    return wrong
