"""What members agree on in small and large worlds; here the members are threads of one process."""

from __future__ import annotations

import time

import pytest

from dualdist.core.agreement.call import Call
from dualdist.core.agreement.channel import JOIN
from dualdist.core.agreement.connections import ACTIVE, FAILED, JOINED, Connections, PendingCall, Verdict, _Peer, agree
from dualdist.core.collectives.allreduce import ALLREDUCE
from dualdist.errors import HorovodInternalError

from .test_connections import each_of

SIZES = (1, 2, 3, 8, 17)

CALL = Call(ALLREDUCE, (("shape", (2,)),), site=("train.py", 1))


def verdicts(entries: list[PendingCall], timeline: int | None = None) -> list[Verdict]:
    """Return each member's verdict on its entry. timeline: the member that writes a timeline."""

    def agreed(peers: Connections) -> Verdict:
        own = entries[peers.rank]
        return agree(peers, own.state, own.call, own.issued, needs_times=peers.rank == timeline)

    return each_of(len(entries), agreed)


@pytest.mark.parametrize("are_equal", [True, False])
@pytest.mark.parametrize("size", SIZES)
def test_members_get_the_counts_and_payloads_of_all_in_rank_order(size: int, are_equal: bool) -> None:
    sent = [(7, b"data") if are_equal else (rank // 3, bytes([rank % 2])) for rank in range(size)]
    calls = [Call(CALL.kind, CALL.arguments, None, CALL.site, *one) for one in sent]
    found = verdicts([PendingCall(ACTIVE, call) for call in calls])
    assert [verdict.call for verdict in found] == calls
    for verdict in found:
        assert not verdict.joined and verdict.error is None
        assert list(zip(verdict.counts, verdict.payloads, strict=True)) == sent


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
    assert [verdict.call for verdict in verdicts([PendingCall(state, CALL)] * 2)] == [None] * 2


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("is_equal", [True, False])
def test_the_member_with_a_timeline_gets_the_time_of_each_call(size: int, is_equal: bool) -> None:
    before = time.time_ns()
    calls = [CALL if is_equal else Call(CALL.kind, name=str(rank)) for rank in range(size)]
    entries = [PendingCall(ACTIVE, call, issued=time.time_ns()) for call in calls]
    for verdict in verdicts(entries, timeline=size - 1):
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
    for size, rounds in ((2, 1), (16, 4), (17, 5), (32, 5)):
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
