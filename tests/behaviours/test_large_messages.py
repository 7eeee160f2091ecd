"""Broadcasts, gathers and exchanges of many sizes, which ranks of one host may do in several rounds."""

from __future__ import annotations

import pytest
import torch

import dualdist as hvd

from ..helpers.world import everywhere

LENGTHS = (0, 1, 80_001, 2_300_003)
"""Odd numbers of float32. The last, 9.2 MB, are more than what members of a host exchange at once, 8 MiB."""


def values(rank: int, length: int) -> torch.Tensor:
    return (torch.arange(length) + 3 * rank) % 251 + rank / 4.0


@everywhere
def test_every_root_sends_a_tensor_of_any_size() -> None:
    for root in range(hvd.size()):
        for length in LENGTHS:
            own = values(hvd.rank(), length)
            assert torch.equal(hvd.broadcast(own, root), values(root, length))
            assert torch.equal(own, values(hvd.rank(), length))


@everywhere
def test_a_model_is_sent_whose_tensors_do_not_fit_one_message() -> None:
    lengths = [1 << 18, 3, 2_100_001, 1, 2_100_001, 0, 5]
    state = {str(place): values(hvd.rank() + place, length) for place, length in enumerate(lengths)}
    hvd.broadcast_parameters(state, hvd.size() - 1)
    for place, length in enumerate(lengths):
        assert torch.equal(state[str(place)], values(hvd.size() - 1 + place, length))


@everywhere
def test_a_tensor_of_any_size_is_gathered() -> None:
    for length in LENGTHS:
        rows = [values(rank, length) for rank in range(hvd.size())]
        assert torch.equal(hvd.allgather(rows[hvd.rank()]), torch.cat(rows))
    uneven = [values(rank, 3_000_001 * rank + 1) for rank in range(hvd.size())]
    assert torch.equal(hvd.allgather(uneven[hvd.rank()]), torch.cat(uneven))


@pytest.mark.parametrize("length", LENGTHS[1:])
@everywhere
def test_ranks_send_each_other_tensors_of_any_size(length: int) -> None:
    rank, size = hvd.rank(), hvd.size()
    # From rank i to rank j: nothing if both are rank 0, else fewer the greater i is.
    counts = [[0 if i == j == 0 else length // (i + 1) + j for j in range(size)] for i in range(size)]
    rows = [values(i, sum(counts[i])) for i in range(size)]
    output, received = hvd.alltoall(rows[rank], torch.tensor(counts[rank], dtype=torch.int32))
    assert received.tolist() == [counts[i][rank] for i in range(size)]
    assert torch.equal(output, torch.cat([rows[i].split(counts[i])[rank] for i in range(size)]))


@pytest.mark.only_ci
@everywhere
def test_messages_of_all_kinds_in_flight_together() -> None:
    rank, size = hvd.rank(), hvd.size()
    for length in LENGTHS[1:]:
        own = values(rank, length * size)
        gathered = hvd.allgather_async(own, name="gather")
        sent = hvd.broadcast_async(own, size - 1, name="broadcast")
        total = hvd.allreduce_async(torch.full((length,), rank + 1.0), op=hvd.Sum, name="sum")
        exchanged = hvd.alltoall_async(own, name="exchange")
        parts = [values(other, length * size).split(length)[rank] for other in range(size)]
        assert torch.equal(hvd.synchronize(exchanged)[0], torch.cat(parts))
        assert torch.equal(hvd.synchronize(total), torch.full((length,), size * (size + 1) / 2))
        assert torch.equal(hvd.synchronize(sent), values(size - 1, length * size))
        assert torch.equal(
            hvd.synchronize(gathered), torch.cat([values(other, length * size) for other in range(size)])
        )
