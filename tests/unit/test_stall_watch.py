"""What the ranks of a call are doing, asked by one of them. All watches run in this process."""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
from collections.abc import Iterator, Sequence
from unittest import mock

import pytest

from dualdist.core.agreement.call import Call
from dualdist.core.agreement.guard import Guard
from dualdist.core.collectives import join
from dualdist.core.collectives.allreduce import ALLREDUCE
from dualdist.core.types import Settings
from dualdist.errors import ConfigurationError, StallError
from dualdist.observation import survey as survey_module
from dualdist.observation.survey import (
    ABSENT,
    BEHIND,
    ENDED,
    OUTSIDE,
    WAITING,
    Doing,
    StallWatch,
    Survey,
    WatchedChannel,
)

from ..helpers.collected_warnings import warned

LOSS = Call(ALLREDUCE, name="loss", site=("train.py", 7))
BARRIER = Call(join.BARRIER, site=("train.py", 9))
TEXT = "allreduce(name='loss') at train.py:7"
SIZE = 5


class Rank:
    """The watch of one rank, and its channels."""

    def __init__(self, rank: int) -> None:
        self.watch = StallWatch(rank, SIZE, "127.0.0.1", Settings())
        self.pending: list[Call] = []
        self.world = self.watch.add_channel("set 0", tuple(range(SIZE)), lambda: self.pending)
        self.pair = self.watch.add_channel("set 1", (3, 4))


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Sequence[Rank]]:
    """Five ranks, with a channel of all and one of the last two. Every rank has made one call.

    The system may stop this process, and with it all ranks, for longer than a rank waits for the others' answers.
    """
    monkeypatch.setattr(survey_module, "_FAILED_SECONDS", 30.0)
    monkeypatch.setattr(survey_module, "_STALLED_SECONDS", 60.0)
    with contextlib.ExitStack() as stack:
        made = [Rank(rank) for rank in range(SIZE)]
        servers = [rank.watch.server for rank in made]
        for rank in made:
            stack.callback(rank.watch.close)
            rank.watch.start([server.contact for server in servers if server is not None])
            rank.world.begun(BARRIER)
            rank.world.ended()
        yield made


def begin(ranks: Sequence[Rank], call: Call = LOSS) -> WatchedChannel:
    """Let `ranks` begin `call`; return the channel of the first."""
    for rank in ranks:
        rank.world.begun(call)
    return ranks[0].world


def test_a_survey_says_what_each_rank_does(ranks: Sequence[Rank]) -> None:
    channel = begin(ranks[:3])
    ranks[1].world.ended()
    ranks[2].watch.close()
    ranks[4].pair.begun(BARRIER)
    survey = channel.survey()
    assert survey.missing == [2, 3, 4]
    assert str(survey).splitlines() == [
        "missing ranks: [2, 3, 4].",
        "  rank 2: process ended, or called shutdown()",
        "  rank 3: in no collective",
        "  rank 4: waiting in barrier() at train.py:9 of process set 1",
        f"  rank 0: waiting in {TEXT}",
        "  rank 1: done with this call, in no collective",
    ]


def test_a_survey_needs_no_thread_where_the_interpreter_ends(ranks: Sequence[Rank]) -> None:
    with mock.patch("concurrent.futures.thread._shutdown", True):
        assert begin(ranks[:1]).survey().missing == [1, 2, 3, 4]


def test_a_rank_that_is_ahead_is_not_missing(ranks: Sequence[Rank]) -> None:
    channel = begin(ranks)
    for rank in ranks[1:]:
        rank.world.ended()
        rank.world.begun(BARRIER)
    survey = channel.survey()
    assert survey.missing == []
    assert str(survey).splitlines() == [
        "missing ranks: [].",
        f"  rank 0: waiting in {TEXT}",
        "  ranks 1, 2, 3, 4: done with this call, waiting in barrier() at train.py:9",
    ]


def test_ranks_that_wait_for_their_devices_give_up_when_a_member_does(ranks: Sequence[Rank]) -> None:
    """The rank that has died is no peer of theirs. What a rank outside of the process set says does not count."""
    ranks[1].watch.close()
    begin(ranks[:1]).fail()
    given_up = list[str]()
    for name in ("world", "pair"):
        connections = mock.Mock(**{"has_failed_peer.return_value": False})
        connections.lost_peers.return_value = connections.peers_that_succeeded.return_value = []
        guard = Guard(connections, functools.partial(given_up.append, name))
        observer = getattr(ranks[4], name)
        guard.run(observer, BARRIER, mock.Mock())
        for _ in range(2):
            guard.check_peers(observer)
    assert given_up == ["world"]


def test_a_rank_that_gives_up_still_counts_as_waiting(ranks: Sequence[Rank]) -> None:
    channel, other = begin(ranks[:1]), begin(ranks[1:2], BARRIER)
    other.give_up()
    assert [rank.world.is_crossed for rank in ranks] == [True, *[False] * (SIZE - 1)]
    other.ended()
    survey = channel.survey()
    assert "  rank 1: waiting in barrier() at train.py:9" in str(survey).splitlines()
    assert survey.missing == [1, 2, 3, 4]


def test_a_rank_that_gave_up_and_left_is_not_missing(ranks: Sequence[Rank]) -> None:
    channel = begin(ranks[:2])
    ranks[1].world.give_up()
    ranks[1].watch.close()
    channel.ended()
    guard = Guard(mock.Mock(), lambda: None)
    channel.number -= 1  # of the call that rank 1 has given up
    with pytest.raises(StallError, match=r"missing ranks: \[2, 3, 4\]\."):
        guard.run(channel, LOSS, mock.Mock(side_effect=StallError("its own timeout")))


def test_a_rank_that_waits_for_another_call_is_missing_unless_it_has_made_both(ranks: Sequence[Rank]) -> None:
    ranks[2].pending.append(LOSS)
    for rank, call in zip(ranks, [LOSS, BARRIER, BARRIER, LOSS, LOSS], strict=True):
        rank.world.begun(call)
    assert str(ranks[0].world.survey()).splitlines() == [
        "missing ranks: [1].",
        "  rank 1: waiting in barrier() at train.py:9",
        f"  ranks 0, 3, 4: waiting in {TEXT}",
        "  rank 2: waiting in barrier() at train.py:9",
    ]


def test_a_rank_that_waits_in_an_earlier_call_is_not_missing_if_another_one_has_died(ranks: Sequence[Rank]) -> None:
    channel = begin(ranks[:4])
    channel.ended()
    channel.begun(BARRIER)
    assert channel.survey().missing == [1, 2, 3, 4]
    ranks[2].watch.close()
    survey = channel.survey()
    assert str(survey).splitlines() == [
        "missing ranks: [2, 4].",
        "  rank 2: process ended, or called shutdown()",
        "  rank 4: in no collective",
        "  rank 0: waiting in barrier() at train.py:9",
        f"  ranks 1, 3: waiting in {TEXT}",
    ]


def test_a_rank_whose_call_was_interrupted_also_in_another_channel_is_missing(ranks: Sequence[Rank]) -> None:
    channel = begin(ranks)
    gradients = ranks[2].watch.add_channel("set 0, gradients", channel.ranks)
    gradients.begun(BARRIER)
    gradients.interrupted(ValueError())
    gradients.ended()
    assert channel.survey(has_failed=True).missing == [2]
    ranks[1].world.interrupted(KeyboardInterrupt())
    ranks[1].world.ended()
    assert str(channel.survey()).splitlines()[:3] == [
        "missing ranks: [1, 2].",
        "  rank 1: interrupted by an exception: KeyboardInterrupt()",
        "  rank 2: interrupted by an exception: ValueError()",
    ]


def test_ranks_that_are_late_are_not_missing_when_the_backend_fails(ranks: Sequence[Rank]) -> None:
    channel = begin(ranks[:3])
    assert channel.survey(has_failed=True).missing == []
    ranks[2].watch.close()
    assert channel.survey().missing == [2, 3, 4]
    assert channel.survey(has_failed=True).missing == [2]


def test_the_cause_may_be_outside_the_process_set(ranks: Sequence[Rank]) -> None:
    begin(ranks[1:4])
    ranks[1].watch.close()
    ranks[3].world.fail()
    ranks[3].watch.close()
    ranks[4].pair.begun(BARRIER)
    assert str(ranks[4].pair.fail()).splitlines() == [
        "missing ranks: [1].",
        f"  rank 3: ended because of rank 1, in {TEXT}",
        "  rank 4: waiting in barrier() at train.py:9",
    ]


def test_ranks_outside_the_process_set_know_why_a_rank_ended(ranks: Sequence[Rank]) -> None:
    channel = begin(ranks[:2])
    ranks[3].pair.begun(BARRIER)
    ranks[4].watch.close()
    ranks[3].pair.fail()
    ranks[3].watch.close()
    assert channel.fail().missing == [4]


def test_a_rank_without_the_time_to_say_why_it_ended_is_not_missing_if_another_has_named_the_cause(
    ranks: Sequence[Rank],
) -> None:
    channel = begin(ranks[:3])
    ranks[2].watch.close()
    ranks[1].world.fail()
    ranks[3].watch.close()
    assert channel.fail().missing == [2]


def test_ranks_that_finished_are_missing_only_if_no_other_has_ended(ranks: Sequence[Rank]) -> None:
    channel = begin(ranks[:3])
    ranks[3].watch.close()
    assert channel.fail([3, 4]).missing == [3]
    ranks[4].watch.close()
    ranks[2].watch.close()
    assert channel.fail([3, 4]).missing == [2]


def test_a_rank_that_answers_slowly_is_not_missing_if_another_has_ended(
    ranks: Sequence[Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(survey_module, "_FAILED_SECONDS", 2.0)
    channel, server, answers = begin(ranks[:3]), ranks[1].watch.server, threading.Event()
    assert server is not None
    answer = server._answer
    server._answer = lambda question: answers.wait() and answer(question)
    ranks[2].watch.close()
    survey = channel.survey(has_failed=True)
    answers.set()
    assert survey.missing == [2]
    why = "it runs: it is about to end, a thread keeps Python's global lock, or it is slow"
    assert survey.members[1].text == f"no answer for 2 s: {why}"


@pytest.mark.parametrize(
    ("doing", "missing"),
    [
        ([WAITING, OUTSIDE, ABSENT], [2]),
        ([WAITING, OUTSIDE, OUTSIDE], [1, 2]),
        ([WAITING, OUTSIDE, BEHIND], [1, 2]),
        ([WAITING, ENDED, OUTSIDE], [1, 2]),
    ],
)
def test_a_rank_in_torch_distributed_is_missing_unless_one_is_in_no_call(doing: list[str], missing: list[int]) -> None:
    assert Survey({rank: Doing(kind, "") for rank, kind in enumerate(doing)}).missing == missing


@pytest.mark.parametrize(("share", "is_logged"), [(0.25, True), (0.75, False), (1.0, False)])
def test_rank_0_logs_a_slow_rank_from_the_share_on_that_is_set(
    share: float, is_logged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In each second, rank 0 waits for half of it."""
    monkeypatch.setattr(survey_module, "_LOOK_SECONDS", 0.0)
    monkeypatch.setattr(survey_module, "_FAILED_SECONDS", 30.0)
    settings = Settings(stall_warn_seconds=0.16, env={"DUALDIST_SLOW_WARN_SHARE": str(share)})
    ranks = [StallWatch(rank, 2, "127.0.0.1", settings) for rank in range(2)]
    looks, has_looked_twice = itertools.count(1), threading.Event()

    def report() -> None:  # called before each look of rank 0's thread
        if next(looks) == 4:
            has_looked_twice.set()

    def spent(waiting: int) -> Iterator[tuple[int, ...]]:
        return ((seconds * 10**9, seconds * waiting, 0, 0, 0, 0) for seconds in itertools.count())

    monkeypatch.setattr(ranks[0], "_report", report)
    with warned() as messages, contextlib.ExitStack() as stack:
        for watch, waiting in zip(ranks, (10**9 // 2, 0), strict=True):
            stack.callback(watch.close)
            monkeypatch.setattr(watch.usage, "values", functools.partial(next, spent(waiting)))
        for watch in ranks:
            watch.start([watch.server.contact for watch in ranks if watch.server is not None])
        assert has_looked_twice.wait(30)
    assert (
        any("50 % of the time (0.5 of 1.0 s) more than rank 1 since " in message for message in messages) == is_logged
    )


@pytest.mark.parametrize("text", ["0", "1.5", "nan", "much"])
def test_the_share_from_which_a_slow_rank_is_logged_is_part_of_a_whole(text: str) -> None:
    name = "DUALDIST_SLOW_WARN_SHARE"
    with pytest.raises(ConfigurationError, match=f"`{name}` must be a positive, .* number of at most 1"):
        StallWatch(0, 1, "127.0.0.1", Settings(env={name: text}))
