"""What all members do about their pending calls: each computes it from the standings of all members."""

from __future__ import annotations

import pickle
import sys

import dualdist
from dualdist.core.agreement.call import Call, Kind
from dualdist.core.agreement.connections import ACTIVE, FAILED, PendingCall, payload_capacity
from dualdist.core.agreement.matching import Match, Outcome, Standing, match
from dualdist.core.collectives.allreduce import ALLREDUCE

RANKS = (0, 2, 5)


def call(name: str | None = None, line: int = 1) -> Call:
    return Call(ALLREDUCE, (), name, ("train.py", line))


def made(*calls: Call) -> Standing:
    """Return the standing of a member that computes while `calls` are pending."""
    return Standing(tuple(PendingCall(ACTIVE, each) for each in calls))


def waits(*calls: Call) -> Standing:
    """Return the standing of a member whose script waits for the last of `calls`."""
    return Standing(made(*calls).entries, frozenset([len(calls) - 1]), blocked=True)


def failed(line: int, *later: Call, blocked: bool = False) -> Standing:
    """Return the standing of a member that failed in a call at `line`."""
    entries = PendingCall(FAILED, call(line=line), "`splits` must fit"), *made(*later).entries
    return Standing(entries, frozenset([len(later)] if blocked else []), blocked)


def found(*standings: Standing) -> Match:
    return match(standings, RANKS[: len(standings)])


def only(*standings: Standing) -> Outcome:
    (step,) = found(*standings).outcomes
    return step


def test_a_long_list_of_pending_calls_is_cut() -> None:
    calls = [call(name=str(number)) for number in range(1000)]
    (error,) = {step.verdict.error for step in found(waits(*calls, call("a")), waits(call("b"))).outcomes}
    assert error is not None and len(error) < 5000 and "\n  and 980 more calls\n" in error


def test_a_failed_call_raises_on_the_members_at_the_same_line_alone() -> None:
    step = only(failed(1), waits(call(line=1)), waits(call(line=2)))
    assert step.verdict.call is None and step.verdict.raising == {1} and step.entries == (0, 0, None)
    assert step.verdict.error is not None
    assert "rank 0 failed in allreduce() at train.py:1: `splits` must fit" in step.verdict.error


def test_a_failed_call_waits_for_members_that_may_still_make_it() -> None:
    later = call(line=3)
    assert found(failed(1, later, blocked=True), made(call(line=2)), waits(call(line=1))) == Match()


def test_failed_calls_are_matched_by_their_order_on_the_line() -> None:
    steps = found(failed(1, call(line=1)), waits(call(line=1), call(line=1))).outcomes
    assert [(step.entries, bool(step.verdict.raising)) for step in steps] == [((0, 0), True), ((1, 1), False)]


def test_a_failed_call_waits_for_a_member_whose_call_just_ends() -> None:
    ahead = Standing((*failed(1).entries, *failed(1).entries))
    step = only(ahead, waits(call(line=1)))
    assert step.entries == (0, 0) and step.verdict.raising == {1}


def test_payloads_of_all_members_together_stay_small() -> None:
    assert payload_capacity(2) == 2048
    for size in (2, 3, 100, 10_000):
        assert payload_capacity(size) * size <= 64 << 10


def test_each_kind_has_a_name_of_its_own_and_can_be_sent() -> None:
    for name in dualdist.__all__:
        getattr(dualdist, name)  # imports it
    modules = [module for name, module in sys.modules.items() if name.startswith("dualdist.")]
    kinds = {id(row): row for module in modules for row in vars(module).values() if isinstance(row, Kind)}
    assert len({kind.name for kind in kinds.values()}) == len(kinds) > 20
    assert all(pickle.loads(pickle.dumps(kind)) == kind for kind in kinds.values())
