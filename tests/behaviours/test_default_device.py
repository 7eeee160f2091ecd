"""The package works on the tensors that it is given, whatever the default device of the script is.

A script may call `torch.set_default_device("cuda")`. The device "meta" shows on any machine what follows it: it has no
numbers.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import dualdist as hvd

from ..helpers.styles import distributed
from ..helpers.world import everywhere


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(*shape, device="cpu")


@everywhere
def test_collectives_do_not_follow_the_default_device() -> None:
    rank, size = hvd.rank(), hvd.size()
    sparse = torch.sparse_coo_tensor(
        torch.tensor([[rank]], device="cpu"), ones(1), (size,), device="cpu", check_invariants=True
    )
    with torch.device("meta"):
        total = hvd.allreduce(ones(3), op=hvd.Sum)
        rows = hvd.allgather(ones(rank + 1) * rank)
        received, splits = hvd.alltoall(ones(size), splits=torch.ones(size, dtype=torch.int32, device="cpu"))
        gathered = hvd.allgather_object({"rank": rank, "tensor": ones(2)})
        root = hvd.broadcast_object([rank, ones(2)], 0)
        part = hvd.reducescatter(ones(size), op=hvd.Sum)
        reduced = hvd.sparse_allreduce_async(sparse, "sparse", hvd.Sum)().to_dense()
        last = hvd.join()
    assert total.tolist() == [size] * 3
    assert rows.tolist() == [float(other) for other in range(size) for _ in range(other + 1)]
    assert (received.tolist(), splits.tolist()) == ([1.0] * size, [1] * size)
    assert [entry["rank"] for entry in gathered] == list(range(size))
    assert root[0] == 0 and root[1].tolist() == [1.0, 1.0]
    assert part.tolist() == [float(size)]
    assert reduced.tolist() == [1.0] * size
    assert 0 <= last < size


@pytest.mark.parametrize("style", ["module", "optimizer"])
@pytest.mark.parametrize("is_sparse", [False, True])
@everywhere
def test_training_does_not_follow_the_default_device(style: str, is_sparse: bool) -> None:
    model: Any = torch.nn.Embedding(4, 2, sparse=is_sparse, device="cpu")
    torch.nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    rows = torch.tensor([hvd.rank() % 4], device="cpu")
    with torch.device("meta"):
        hvd.broadcast_parameters(model.state_dict(), 0)
        hvd.broadcast_optimizer_state(optimizer, 0)
        wrapped, optimizer = distributed(style, model, optimizer)
        for _ in range(2):
            optimizer.zero_grad()
            wrapped(rows).sum().backward()
            optimizer.step()
        hvd.check_replicas(model, optimizer)
    expected = [1 - 2 * sum(other % 4 == row for other in range(hvd.size())) / hvd.size() for row in range(4)]
    torch.testing.assert_close(model.weight[:, 0], torch.tensor(expected))


@everywhere
def test_samplers_and_metrics_do_not_follow_the_default_device() -> None:
    with torch.device("meta"):
        own = list(hvd.DistributedSampler(range(6), shuffle=True, drop_last=False))
        mean = hvd.metrics.Mean()
        mean.update(ones(2) * hvd.rank())
        value = float(mean.compute())
    assert {index for part in hvd.allgather_object(own) for index in part} == set(range(6))
    assert value == (hvd.size() - 1) / 2
