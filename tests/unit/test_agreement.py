"""The verdict that all members compute from the calls of all members."""

from __future__ import annotations

from typing import Any

from dualdist.agreement import call_kinds
from dualdist.agreement.call import Call
from dualdist.agreement.call_kinds import Kind
from dualdist.agreement.verdict import ACTIVE, FAILED, JOINED, Entry, payload_capacity, resolve

RANKS = (0, 2, 5)


def call(
    kind: Kind = call_kinds.ALLREDUCE, line: int = 1, count: int = 0, flag: bool = False, **arguments: Any
) -> Call:
    return Call(kind, tuple(arguments.items()), site=("train.py", line), count=count, flag=flag)


def active(made: Call) -> Entry:
    return Entry(ACTIVE, made)


JOIN = Entry(JOINED, Call(call_kinds.JOIN, site=("train.py", 9)))


def test_equal_calls_run_with_every_count_and_flag() -> None:
    calls = [call(count=number, flag=number == 1, line=number) for number in (3, 1, 2)]
    verdict = resolve([active(made) for made in calls], RANKS)
    assert verdict.call is not None and verdict.call.kind == call_kinds.ALLREDUCE
    assert verdict.counts == (3, 1, 2) and verdict.flags == (False, True, False)
    assert not verdict.joined and not verdict.raising and verdict.error is None


def test_different_calls_raise_on_all_and_show_each_group_once() -> None:
    one, other = call(line=1, shape=(2,), op="Sum"), call(line=7, shape=(3,), op="Sum")
    verdict = resolve([active(one), active(other), active(one)], RANKS)
    assert verdict.call is None and verdict.raising == {0, 1, 2}
    assert verdict.error is not None and verdict.error.splitlines() == [
        "Mismatched shape between ranks:",
        "  ranks 0, 5 called allreduce(shape=(2,), op=Sum) at train.py:1",
        "  rank 2 called allreduce(shape=(3,), op=Sum) at train.py:7",
        "Every rank of a process set must call the same collectives in the same order.",
    ]


def test_the_first_difference_is_named() -> None:
    cases = [
        (call(call_kinds.ALLREDUCE), call(call_kinds.BROADCAST), "collectives"),
        (call(shape=1, op="Sum"), call(shape=1, op="Max"), "op"),
        (Call(call_kinds.ALLREDUCE, (), "a"), Call(call_kinds.ALLREDUCE, (), "b"), "name"),
        (call(factor=1), call(factor=1.0), "factor"),
    ]
    for one, other, difference in cases:
        if one.identity == other.identity:
            continue
        error = resolve([active(one), active(other)], RANKS[:2]).error
        assert error is not None and error.startswith(f"Mismatched {difference} between ranks:")


def test_the_call_site_may_differ() -> None:
    assert resolve([active(call(line=1)), active(call(line=2))], RANKS[:2]).error is None


def test_the_active_members_run_their_call_while_others_have_joined() -> None:
    verdict = resolve([JOIN, active(call(count=4)), JOIN], RANKS)
    assert verdict.call is not None and verdict.joined == {0, 2}
    assert not verdict.raising


def test_calls_that_cannot_run_with_joined_members_raise_on_the_active_ones() -> None:
    verdict = resolve([active(call(call_kinds.BROADCAST)), JOIN, JOIN], RANKS)
    assert verdict.call is None and verdict.raising == {0}
    assert verdict.error is not None and "not supported with Join" in verdict.error
    assert "ranks 2, 5 have joined" in verdict.error


def test_a_mismatch_raises_on_the_active_members_alone() -> None:
    verdict = resolve([JOIN, active(call(call_kinds.ALLREDUCE)), active(call(call_kinds.BARRIER))], RANKS)
    assert verdict.raising == {1, 2} and verdict.joined == {0}


def test_when_all_have_joined_there_is_nothing_to_run() -> None:
    verdict = resolve([JOIN] * 3, RANKS)
    assert verdict.call is None and verdict.joined == {0, 1, 2} and verdict.error is None


def test_a_failed_call_raises_on_the_members_at_the_same_line() -> None:
    failed = Entry(FAILED, call(line=1), "`splits` must fit")
    verdict = resolve([failed, active(call(line=1)), active(call(line=2))], RANKS)
    assert verdict.call is None and verdict.raising == {1}
    assert verdict.error is not None
    assert "rank 0 failed in allreduce() at train.py:1: `splits` must fit" in verdict.error


def test_a_failed_call_that_no_other_member_made_raises_nowhere() -> None:
    verdict = resolve([Entry(FAILED, call(line=1), "wrong"), active(call(line=2)), JOIN], RANKS)
    assert verdict.call is None and not verdict.raising


def test_gradients_already_sent_are_received_in_spite_of_a_mismatch() -> None:
    gradients = call(call_kinds.GRADIENTS, grad_sync=0)
    verdict = resolve([active(gradients), active(call(call_kinds.BARRIER)), active(gradients)], RANKS)
    assert verdict.raising == {0, 1, 2} and verdict.drained == (gradients,)


def test_payloads_of_all_members_together_stay_small() -> None:
    assert payload_capacity(2) == 2048
    for size in (2, 3, 100, 10_000):
        assert payload_capacity(size) * size <= 64 << 10


def test_each_kind_has_a_name_of_its_own() -> None:
    rows = [row for row in vars(call_kinds).values() if isinstance(row, Kind)]
    assert len({row.name for row in rows}) == len(rows)
