"""What all members do about their pending calls: each computes it from the standings of all members."""

from __future__ import annotations

import pickle
import sys
from typing import Any

import dualdist
from dualdist.core.agreement.call import Call, Kind
from dualdist.core.agreement.channel import JOIN
from dualdist.core.agreement.matching import (
    ACTIVE,
    FAILED,
    JOINED,
    Match,
    Outcome,
    PendingCall,
    Standing,
    match,
    payload_capacity,
)
from dualdist.core.collectives.allgather import ALLGATHER
from dualdist.core.collectives.allreduce import ALLREDUCE
from dualdist.core.collectives.broadcast import BROADCAST
from dualdist.core.collectives.join import BARRIER
from dualdist.core.gradients.reducer import GRADIENTS

RANKS = (0, 2, 5)


def call(
    kind: Kind = ALLREDUCE, name: str | None = None, line: int = 1, count: int = 0, **arguments: Any
) -> Call:
    return Call(kind, tuple(arguments.items()), name, ("train.py", line), count)


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


HAS_JOINED = Standing((PendingCall(JOINED, call(JOIN, line=9)),), frozenset([0]), blocked=True)


def found(*standings: Standing) -> Match:
    return match(standings, RANKS[: len(standings)])


def only(*standings: Standing) -> Outcome:
    (step,) = found(*standings).outcomes
    return step


def errors(*standings: Standing) -> list[str]:
    """Return the lines of the error, which all steps have."""
    (error,) = {step.verdict.error for step in found(*standings).outcomes}
    assert error is not None
    return error.splitlines()


def test_equal_calls_run_with_every_count() -> None:
    step = only(*(made(call(count=number, line=number)) for number in (3, 1, 2)))
    assert step.verdict.call is not None and step.verdict.call.kind == ALLREDUCE
    assert step.verdict.counts == (3, 1, 2)
    assert not step.verdict.joined and not step.verdict.raising and step.entries == (0, 0, 0)


def test_calls_with_names_match_in_any_order_and_run_in_that_of_the_first_member() -> None:
    a, b, c = (call(name=name) for name in "abc")
    steps = found(made(a, b, c), made(c, a), waits(a, b, c)).outcomes
    assert [step.verdict.call for step in steps] == [a, c]
    assert [step.entries for step in steps] == [(0, 1, 0), (2, 0, 2)]


def test_calls_without_a_name_match_by_their_order_within_a_kind() -> None:
    reduce, gather = call(shape=2), call(ALLGATHER)
    other = call(shape=3)
    steps = found(made(reduce, other, gather), made(gather, reduce, other), made(reduce, gather)).outcomes
    assert [(step.verdict.call, step.entries) for step in steps] == [(reduce, (0, 1, 0)), (gather, (2, 0, 1))]


def test_members_wait_while_one_of_them_can_make_another_call() -> None:
    a, b = call(name="a"), call(name="b")
    assert found(waits(a), made(b), waits(a)) == Match()
    assert found(made(a), made(b), made(b)) == Match()


def test_different_arguments_raise_on_all_at_once_and_show_each_group_once() -> None:
    one, other = call(line=1, shape=(2,), op="Sum"), call(line=7, shape=(3,), op="Sum")
    step = only(made(one), made(other), made(one))
    assert step.verdict.call is None and step.verdict.raising == {0, 1, 2} and step.entries == (0, 0, 0)
    assert step.verdict.error is not None and step.verdict.error.splitlines()[:-1] == [
        "Mismatched shape between ranks:",
        "  ranks 0, 5 called allreduce(shape=(2,), op=Sum) at train.py:1",
        "  rank 2 called allreduce(shape=(3,), op=Sum) at train.py:7",
    ]


def test_when_all_wait_for_different_calls_everything_pending_raises() -> None:
    later = call(name="later", line=3)
    standings = waits(later, call(name="a")), waits(call(name="b", line=2)), waits(call(name="a"))
    steps = found(*standings).outcomes
    assert [(step.entries, sorted(step.verdict.raising)) for step in steps] == [
        ((0, None, None), [0]),
        ((1, None, None), [0]),
        ((None, 0, None), [1]),
        ((None, None, 0), [2]),
    ]
    assert errors(*standings)[:-1] == [
        "Mismatched name between ranks:",
        "  ranks 0, 5 called allreduce(name='a') at train.py:1",
        "  rank 2 called allreduce(name='b') at train.py:2",
        "  rank 0 has started allreduce(name='later') at train.py:3",
    ]


def test_a_long_list_of_pending_calls_is_cut() -> None:
    calls = [call(name=str(number)) for number in range(1000)]
    lines = errors(waits(*calls, call(name="a")), waits(call(name="b")))
    assert len(lines) < 50 and "  and 980 more calls" in lines


def test_the_first_difference_is_named() -> None:
    for one, other, difference in (
        (call(ALLREDUCE), call(BROADCAST), "collectives"),
        (call(shape=1, op="Sum"), call(shape=1, op="Max"), "op"),
        (call(name="a"), call(name="b"), "name"),
        (call(factor=1), call(factor=1.5), "factor"),
    ):
        assert errors(waits(one), waits(other))[0] == f"Mismatched {difference} between ranks:"


def test_the_active_members_run_their_call_while_others_have_joined() -> None:
    matched = found(HAS_JOINED, made(call(count=4)), HAS_JOINED)
    (step,) = matched.outcomes
    assert step.verdict.call is not None and step.verdict.joined == matched.joined == {0, 2}
    assert not step.verdict.raising and step.entries == (None, 0, None) and not matched.is_over


def test_a_member_that_joined_after_an_asynchronous_call_still_takes_part_in_it() -> None:
    a, b = call(name="a"), call(name="b")
    joined = Standing((*made(a).entries, *HAS_JOINED.entries), frozenset([1]), blocked=True)
    steps = found(joined, made(b, a)).outcomes
    assert [(step.verdict.call, step.entries, sorted(step.verdict.joined)) for step in steps] == [
        (b, (None, 0), [0]),
        (a, (0, 1), []),
    ]
    matched = found(joined, HAS_JOINED)
    assert [(step.verdict.call, step.entries) for step in matched.outcomes] == [(a, (0, None))]
    assert matched.is_over


def test_calls_that_cannot_run_with_joined_members_raise_on_the_active_ones() -> None:
    verdict = only(made(call(BROADCAST)), HAS_JOINED, HAS_JOINED).verdict
    assert verdict.call is None and verdict.raising == {0}
    assert verdict.error is not None and "not supported with Join" in verdict.error
    assert "ranks 2, 5 have joined" in verdict.error


def test_a_mismatch_raises_on_the_active_members_alone() -> None:
    matched = found(HAS_JOINED, waits(call(ALLREDUCE)), waits(call(BARRIER)))
    assert [step.verdict.raising for step in matched.outcomes] == [{1}, {2}] and matched.joined == {0}


def test_when_all_have_joined_there_is_nothing_to_run() -> None:
    assert found(HAS_JOINED, HAS_JOINED, HAS_JOINED) == Match((), frozenset({0, 1, 2}), is_over=True)


def test_a_failed_call_raises_on_the_members_at_the_same_line_alone() -> None:
    step = only(failed(1), waits(call(line=1)), waits(call(line=2)))
    assert step.verdict.call is None and step.verdict.raising == {1} and step.entries == (0, 0, None)
    assert step.verdict.error is not None
    assert "rank 0 failed in allreduce() at train.py:1: `splits` must fit" in step.verdict.error
    step = only(failed(1), waits(call(line=2)), HAS_JOINED)
    assert step.verdict.call is None and not step.verdict.raising and step.entries == (0, None, None)


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


def test_gradients_already_sent_are_received_in_spite_of_a_mismatch() -> None:
    gradients = call(GRADIENTS, grad_sync=0)
    matched = found(waits(gradients), waits(call(BARRIER)), waits(gradients))
    assert [step.verdict.raising for step in matched.outcomes] == [{0}, {1}, {2}]
    assert matched.drained == (gradients,)


def test_crossed_gradients_raise_and_are_both_received() -> None:
    gradients = [call(GRADIENTS, grad_sync=number) for number in (0, 1)]
    matched = found(*map(waits, gradients))
    assert [step.verdict.raising for step in matched.outcomes] == [{0, 1}]
    assert matched.drained == tuple(gradients)


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
