"""What members agree on in small and large worlds; here the members are threads of one process."""

from __future__ import annotations

import time

import pytest

from dualdist.agreement.call import ALLREDUCE, JOIN, Call
from dualdist.agreement.connections import Connections, _Peer
from dualdist.agreement.matching import ACTIVE, FAILED, JOINED, PendingCall, Verdict, agree
from dualdist.errors import HorovodInternalError

from .test_connections import each_of

SIZES = (1, 2, 3, 8, 9, 12, 16, 17)
"""Up to 8 members send their times with their calls."""

CALL = Call(ALLREDUCE, (("shape", (2,)),), site=("train.py", 1))


def agreed(peers: Connections, own: PendingCall, needs_times: bool = False) -> Verdict:
    return agree(peers, own.state, own.call, own.issued, needs_times=needs_times)


def verdicts(entries: list[PendingCall], timeline: int | None = None) -> list[Verdict]:
    """Return each member's verdict on its entry. timeline: the member that writes a timeline."""
    return each_of(
        len(entries),
        lambda peers: agreed(peers, entries[peers.rank], peers.rank == timeline),
    )


@pytest.mark.parametrize("size", SIZES)
def test_an_equal_call_runs_with_what_each_member_sent(size: int) -> None:
    call = Call(CALL.kind, CALL.arguments, None, CALL.site, 7, b"data")
    for verdict in verdicts([PendingCall(ACTIVE, call)] * size):
        assert verdict.call == call and not verdict.joined and verdict.error is None
        assert verdict.counts == (7,) * size
        assert verdict.payloads == (b"data",) * size


@pytest.mark.parametrize("size", SIZES)
def test_members_get_the_counts_and_payloads_of_all_in_rank_order(size: int) -> None:
    calls = [
        Call(CALL.kind, CALL.arguments, None, CALL.site, rank // 3, bytes([rank % 2])) for rank in range(size)
    ]
    found = verdicts([PendingCall(ACTIVE, call) for call in calls])
    assert [verdict.call for verdict in found] == calls
    for verdict in found:
        assert verdict.counts == tuple(call.count for call in calls)
        assert verdict.payloads == tuple(call.payload for call in calls)


@pytest.mark.parametrize("size", SIZES[1:])
@pytest.mark.parametrize(
    "odd",
    [
        PendingCall(ACTIVE, Call(CALL.kind, (("shape", (3,)),))),
        PendingCall(JOINED, Call(JOIN)),
        PendingCall(FAILED, CALL, "`op` is wrong"),
    ],
    ids=["other arguments", "joined", "failed"],
)
def test_no_member_runs_a_call_that_one_member_did_not_make(size: int, odd: PendingCall) -> None:
    for place in {0, size // 2, size - 1}:
        entries = [odd if rank == place else PendingCall(ACTIVE, CALL) for rank in range(size)]
        assert [verdict.call for verdict in verdicts(entries)] == [None] * size


@pytest.mark.parametrize("state", [JOINED, FAILED])
def test_a_call_that_no_member_has_made_does_not_run(state: int) -> None:
    for size in (2, 9):
        assert [verdict.call for verdict in verdicts([PendingCall(state, CALL)] * size)] == [None] * size


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("is_equal", [True, False])
def test_the_member_with_a_timeline_gets_the_time_of_each_call(size: int, is_equal: bool) -> None:
    before = time.time_ns()
    calls = [CALL if is_equal else Call(CALL.kind, name=str(rank)) for rank in range(size)]
    entries = [PendingCall(ACTIVE, call, issued=time.time_ns()) for call in calls]

    def late(peers: Connections) -> Verdict:
        return agreed(peers, entries[peers.rank], peers.rank == size - 1)

    for verdict in each_of(size, late):
        assert len(verdict.arrivals) == size
        assert all(before <= arrival <= time.time_ns() for arrival in verdict.arrivals)


def test_an_agreement_of_equal_calls_sends_one_message_in_each_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sum over all members: each of n sends log2(n) messages of equal length. It was n - 1 messages of each."""
    sent: list[int] = []
    send = _Peer.send

    def counted(peer: _Peer, message: memoryview) -> int:
        sent.append(len(message))
        return send(peer, message)

    monkeypatch.setattr(_Peer, "send", counted)
    for size, rounds in ((16, 4), (17, 5), (32, 5)):
        sent.clear()
        verdicts([PendingCall(ACTIVE, CALL)] * size)
        assert len(sent) == rounds * size and len(set(sent)) == 1 and sent[0] < 64


@pytest.mark.parametrize("size", [9, 16])
@pytest.mark.parametrize("rounds", [0, 1, 2, 3])
def test_all_members_notice_one_that_dies_in_any_round(size: int, rounds: int) -> None:
    def member(peers: Connections) -> str:
        if peers.rank == 1:
            peers._rounds = peers._rounds[:rounds]
        try:
            agree(peers, ACTIVE, CALL, 1, needs_times=peers.rank == 0)
        except HorovodInternalError:
            return "noticed"
        return "agreed"

    assert each_of(size, member) == ["agreed" if rank == 1 else "noticed" for rank in range(size)]
