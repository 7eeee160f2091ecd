"""What the ranks of a call are doing, asked by one of them. All watches run in this process."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from unittest import mock

import pytest

from dualdist.agreement import call_kinds
from dualdist.agreement.call import Call
from dualdist.agreement.guard import Guard
from dualdist.agreement.watch import StallWatch
from dualdist.errors import StallError
from dualdist.types import Settings

LOSS = Call(call_kinds.ALLREDUCE, name="loss", site=("train.py", 7))
BARRIER = Call(call_kinds.BARRIER, site=("train.py", 9))
TEXT = "allreduce(name='loss') at train.py:7"
SIZE = 5


@pytest.fixture
def watches() -> Iterator[Sequence[StallWatch]]:
    """A watch for each rank, with a channel of all ranks and one of the last two. Every rank has made one call."""
    with contextlib.ExitStack() as stack:
        made = [StallWatch(rank, SIZE, "127.0.0.1", Settings()) for rank in range(SIZE)]
        for watch in made:
            stack.callback(watch.close)
            watch.start([other.contact for other in made if other.contact is not None])
            watch.add_channel("set 0", tuple(range(SIZE)))
            watch.add_channel("set 1", (3, 4))
            watch.begin("set 0", BARRIER)
            watch.end("set 0")
        yield made


def test_a_survey_says_what_each_rank_does(watches: Sequence[StallWatch]) -> None:
    for watch in watches[:3]:
        number = watch.begin("set 0", LOSS)
    watches[1].end("set 0")
    watches[2].close()
    watches[4].begin("set 1", BARRIER)
    survey = watches[0].survey("set 0", number, LOSS.key)
    assert survey.missing == [2, 3, 4]
    assert str(survey).splitlines() == [
        "missing ranks: [2, 3, 4].",
        "  rank 2: process ended, or called shutdown()",
        "  rank 3: in no collective",
        "  rank 4: waiting in barrier() at train.py:9 of process set 1",
        f"  rank 0: waiting in {TEXT}",
        "  rank 1: done with this call, in no collective",
    ]


def test_a_rank_that_is_ahead_is_not_missing(watches: Sequence[StallWatch]) -> None:
    for watch in watches:
        number = watch.begin("set 0", LOSS)
    for watch in watches[1:]:
        watch.end("set 0")
        watch.begin("set 0", BARRIER)
    survey = watches[0].survey("set 0", number, LOSS.key)
    assert survey.missing == []
    assert str(survey).splitlines() == [
        "missing ranks: [].",
        f"  rank 0: waiting in {TEXT}",
        "  ranks 1, 2, 3, 4: done with this call, waiting in barrier() at train.py:9",
    ]


def test_ranks_that_answer_know_why_a_rank_gives_up(watches: Sequence[StallWatch]) -> None:
    number = watches[0].begin("set 0", LOSS)
    survey = watches[0].survey("set 0", number, LOSS.key)
    watches[0].give_notice("set 0", survey)
    assert [watch.notice("set 0") for watch in watches] == [None, *[str(survey)] * (SIZE - 1)]
    assert watches[1].notice("set 1") is None


def test_a_rank_that_gives_up_still_counts_as_waiting(watches: Sequence[StallWatch]) -> None:
    for watch, call in zip(watches[:2], [LOSS, BARRIER], strict=True):
        number = watch.begin("set 0", call)
    watches[1].give_notice("set 0", watches[1].survey("set 0", number, BARRIER.key))
    assert [watch.is_crossed("set 0") for watch in watches] == [True, *[False] * (SIZE - 1)]
    watches[1].end("set 0")
    survey = watches[0].survey("set 0", number, LOSS.key)
    assert "  rank 1: waiting in barrier() at train.py:9" in str(survey).splitlines()
    assert survey.missing == [1, 2, 3, 4]


def test_a_rank_that_gave_up_and_left_is_not_missing(watches: Sequence[StallWatch]) -> None:
    for watch in watches[:2]:
        number = watch.begin("set 0", LOSS)
    found = watches[1].survey("set 0", number, LOSS.key)
    watches[1].give_notice("set 0", found)
    watches[1].close()
    watches[0].end("set 0")

    def stall() -> None:
        raise StallError("its own timeout")

    guard = Guard(watches[0], mock.Mock(), tuple, lambda: None)
    with pytest.raises(StallError, match=r"missing ranks: \[2, 3, 4\]\."):
        guard.run("set 0", LOSS, stall)


def test_a_rank_that_waits_for_another_call_is_missing_unless_it_has_made_both(
    watches: Sequence[StallWatch],
) -> None:
    for rank, call in enumerate([LOSS, BARRIER, BARRIER, LOSS, LOSS]):
        number = watches[rank].begin("set 0", call, lambda rank=rank: [LOSS] if rank == 2 else [])  # type: ignore[misc]
    survey = watches[0].survey("set 0", number, LOSS.key)
    assert str(survey).splitlines() == [
        "missing ranks: [1].",
        "  rank 1: waiting in barrier() at train.py:9",
        f"  ranks 0, 3, 4: waiting in {TEXT}",
        "  rank 2: waiting in barrier() at train.py:9",
    ]


def test_a_rank_that_waits_in_an_earlier_call_is_not_missing_if_another_one_has_died(
    watches: Sequence[StallWatch],
) -> None:
    for watch in watches[:4]:
        number = watch.begin("set 0", LOSS)
    watches[0].end("set 0")
    number = watches[0].begin("set 0", BARRIER)
    assert watches[0].survey("set 0", number, BARRIER.key).missing == [1, 2, 3, 4]
    watches[2].close()
    survey = watches[0].survey("set 0", number, BARRIER.key)
    assert str(survey).splitlines() == [
        "missing ranks: [2, 4].",
        "  rank 2: process ended, or called shutdown()",
        "  rank 4: in no collective",
        "  rank 0: waiting in barrier() at train.py:9",
        f"  ranks 1, 3: waiting in {TEXT}",
    ]


def test_a_rank_whose_call_was_interrupted_is_missing(watches: Sequence[StallWatch]) -> None:
    for watch in watches:
        number = watch.begin("set 0", LOSS)
    watches[1].interrupt("set 0", "KeyboardInterrupt()")
    watches[1].end("set 0")
    survey = watches[0].survey("set 0", number, LOSS.key)
    assert str(survey).splitlines()[:2] == [
        "missing ranks: [1].",
        "  rank 1: interrupted by an exception: KeyboardInterrupt()",
    ]


def test_long_calls_are_shortened(watches: Sequence[StallWatch]) -> None:
    number = watches[1].begin("set 0", Call(call_kinds.OPTIMIZER, (("parameters", "x" * 10_000),)))
    text = str(watches[0].survey("set 0", number, (call_kinds.OPTIMIZER.name, None)))
    assert "...) at ?:0" in text and len(text) < 1000


def test_ranks_that_are_late_are_not_missing_when_the_backend_fails_because_one_has_ended(
    watches: Sequence[StallWatch],
) -> None:
    for watch in watches[:3]:
        number = watch.begin("set 0", LOSS)
    watches[2].close()
    assert watches[0].survey("set 0", number, LOSS.key).missing == [2, 3, 4]
    assert watches[0].survey("set 0", number, LOSS.key, has_failed=True).missing == [2]


def test_a_rank_whose_process_did_not_run_is_missing(watches: Sequence[StallWatch]) -> None:
    for watch in watches:
        number = watch.begin("set 0", LOSS)
    with mock.patch.object(watches[1]._suspension, "_next", time.monotonic() - 700):  # the timeout is 600 s
        assert watches[0].survey("set 0", number, LOSS.key).missing == [1]
        watches[2].close()
        survey = watches[1].survey("set 0", number, LOSS.key)
    assert survey.missing == [1]
    assert (
        f"  rank 1: did not run for 700 s: stopped, or a thread kept Python's global lock; now waiting in {TEXT}"
        in str(survey)
    )
    assert watches[0].survey("set 0", number, LOSS.key).missing == [2]
