"""Collectives over some of the ranks."""

from __future__ import annotations

import threading
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch

import dualdist as hvd
from dualdist.core.world import current

from ..helpers.styles import step
from ..helpers.world import everywhere

pytestmark = pytest.mark.ranks(2, 3)


@everywhere
def test_the_global_set_is_the_world() -> None:
    everyone = hvd.global_process_set
    assert everyone.process_set_id == 0 and everyone.ranks == list(range(hvd.size()))
    assert (everyone.rank(), everyone.size(), everyone.included()) == (hvd.rank(), hvd.size(), True)
    assert hvd.remove_process_set(everyone) is False


@everywhere
def test_a_set_is_added_used_and_removed() -> None:
    ranks = list(range(1, hvd.size()))
    chosen = hvd.ProcessSet(ranks[::-1])
    assert chosen.ranks == ranks and chosen.process_set_id is None
    assert chosen.size() is None and chosen.rank() is None
    assert hvd.add_process_set(chosen) is chosen
    assert isinstance(chosen.process_set_id, int) and chosen.process_set_id > 0
    assert chosen.size() == len(ranks) and chosen.included() == (hvd.rank() > 0)
    if hvd.rank() > 0:
        assert chosen.rank() == hvd.rank() - 1
        held = torch.tensor([float(hvd.rank())])
        assert hvd.allreduce(held, op=hvd.Sum, process_set=chosen).item() == sum(ranks)
        assert hvd.allreduce(held, process_set=chosen).item() == sum(ranks) / len(ranks)
        assert hvd.allgather(held, process_set=chosen).tolist() == ranks
        assert hvd.broadcast(held, root_rank=ranks[-1], process_set=chosen).item() == ranks[-1]
        assert hvd.allgather_object(hvd.rank(), process_set=chosen) == ranks
        assert hvd.broadcast_object(hvd.rank(), ranks[-1], process_set=chosen) == ranks[-1]
        moved = hvd.alltoall(torch.tensor(ranks) + 10 * hvd.rank(), process_set=chosen)
        assert isinstance(moved, torch.Tensor)
        assert moved.tolist() == [10 * other + hvd.rank() for other in ranks]
        assert hvd.reducescatter(torch.tensor(ranks), op=hvd.Sum, process_set=chosen).tolist() == [
            hvd.rank() * len(ranks)
        ]
        hvd.barrier(process_set=chosen)
        with pytest.raises(ValueError, match="root_rank"):
            hvd.broadcast(held, root_rank=0, process_set=chosen)
    else:
        with pytest.raises(ValueError, match="not part of"):
            chosen.rank()
        with pytest.raises(ValueError, match="not part of"):
            hvd.allreduce(torch.ones(1), process_set=chosen)
    assert hvd.remove_process_set(chosen) is True
    assert hvd.remove_process_set(chosen) is False
    assert chosen.process_set_id is None and chosen.size() is None
    with pytest.raises(TypeError, match="registered"):
        hvd.allreduce(torch.ones(1), process_set=chosen)
    hvd.barrier()


@everywhere
def test_a_set_is_added_once() -> None:
    with pytest.raises(ValueError, match="registered already"):
        hvd.add_process_set(list(range(hvd.size())))
    chosen = hvd.add_process_set([0])
    with pytest.raises(ValueError, match="registered already"):
        hvd.add_process_set([0])
    hvd.remove_process_set(chosen)


@pytest.mark.ranks(3)
@everywhere
def test_two_sets_may_be_used_in_a_different_order_on_each_rank() -> None:
    pairs = [hvd.add_process_set(ranks) for ranks in ([0, 1], [1, 2], [0, 2])]
    own = [pair for pair in pairs if pair.included()]
    for order in (own, own[::-1]):
        for numel in (1, 5000):
            held = torch.full((numel,), float(hvd.rank()))
            mixed = order if hvd.rank() % 2 else order[::-1]
            handles = [(pair, hvd.allreduce_async(held, op=hvd.Sum, process_set=pair)) for pair in mixed]
            for pair, handle in handles:
                assert hvd.synchronize(handle).tolist() == [sum(pair.ranks or ())] * numel
    for pair in pairs:
        hvd.remove_process_set(pair)


@pytest.mark.ranks(3)
@everywhere
def test_a_mismatch_inside_a_set_is_an_error_of_its_members_alone() -> None:
    pair = hvd.add_process_set([0, 2])
    if pair.included():
        with pytest.raises(hvd.CollectiveMismatchError, match="rank 2 called"):
            hvd.allreduce(torch.ones(hvd.rank() + 1), process_set=pair)
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=pair).item() == 2
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 3
    hvd.remove_process_set(pair)


@everywhere
def test_collectives_of_a_set_are_differentiable() -> None:
    ranks = list(range(1, hvd.size()))
    chosen = hvd.add_process_set(ranks)
    if chosen.included():
        x = torch.ones(1, requires_grad=True)
        (hvd.allreduce(x, op=hvd.Sum, process_set=chosen) * hvd.rank()).backward()
        assert x.grad is not None and x.grad.item() == sum(ranks)
        y = torch.ones(1, requires_grad=True)
        (hvd.broadcast(y, ranks[-1], process_set=chosen) * hvd.rank()).backward()
        mean = sum(ranks) / len(ranks)
        assert y.grad is not None and y.grad.item() == (mean if hvd.rank() == ranks[-1] else 0.0)
    hvd.remove_process_set(chosen)


@everywhere
def test_an_optimizer_over_a_set_leaves_the_other_ranks_alone() -> None:
    ranks = list(range(1, hvd.size()))
    chosen = hvd.add_process_set(ranks)
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), process_set=chosen)
    for _ in range(2):
        step(optimizer, weight)
    mean = sum(rank + 1 for rank in ranks) / len(ranks)
    assert weight.item() == -2 * (mean if hvd.rank() > 0 else 1.0)
    hvd.remove_process_set(chosen)


@everywhere
def test_an_optimizer_over_a_set_does_not_shift_those_of_the_world() -> None:
    chosen = hvd.add_process_set([0]) if hvd.size() > 1 else hvd.global_process_set
    weights = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
    kept = [torch.optim.SGD([weight], lr=1.0) for weight in weights]
    if hvd.rank() == 0:  # the other ranks do not create it
        hvd.DistributedOptimizer(kept[0], process_set=chosen)
    hvd.DistributedOptimizer(kept[1])
    (weights[1] * float(hvd.rank())).sum().backward()
    assert weights[1].grad is not None
    assert weights[1].grad.tolist() == [sum(range(hvd.size())) / hvd.size()] * 2
    hvd.remove_process_set(chosen)


@pytest.mark.ranks(2)
@pytest.mark.world_kinds("torch-gloo")
@everywhere
def test_connecting_a_group_that_never_ends_is_an_error() -> None:
    """torch's store waits for ever for the answer of a server behind a cut link."""
    backend: Any = current().backend
    soon = 0.05
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "_timeout", timedelta(seconds=soon))
        patch.setattr(backend, "_settings", replace(backend._settings, start_timeout_seconds=soon))
        ended = threading.Event()
        patch.setattr(backend._groups, "make", lambda *arguments, **options: ended.wait())
        with pytest.raises(hvd.StallError, match="did not finish in time"):
            backend.new_groups([0, 1], 1, lambda *arguments: [])
        ended.set()
