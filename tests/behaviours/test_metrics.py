"""Metrics over all ranks, and the outputs of all ranks in the order of the dataset."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import dualdist as hvd
from dualdist import metrics

from ..helpers.world import everywhere
from .test_checkpoint import folder


def values(rank: int) -> torch.Tensor:
    """Return the samples of `rank`: rank 0 has none, rank 1 one, and so on."""
    return torch.arange(rank, dtype=torch.float64) + 10 * rank


def all_values() -> list[float]:
    return [value for rank in range(hvd.size()) for value in values(rank).tolist()]


def mean(numbers: list[float]) -> float:
    return sum(numbers) / len(numbers) if numbers else math.nan


@everywhere
def test_the_mean_is_over_all_samples_and_not_over_the_ranks() -> None:
    whole, batches, extra = metrics.Mean(), metrics.Mean(), metrics.Mean()
    whole.update(values(hvd.rank()))
    for batch in values(hvd.rank()).split(2) if hvd.rank() else ():
        batches.update(batch.mean(), len(batch))
    expected = mean(all_values())
    assert whole.compute().item() == pytest.approx(expected, nan_ok=True)
    assert batches.compute().item() == pytest.approx(expected, nan_ok=True)
    assert whole.compute().dtype == torch.float64
    extra.update(values(hvd.rank()))
    extra.update(1.5, 4)
    extra.update(torch.tensor(2.5), torch.tensor(2))
    extra.update(torch.tensor(3.5), torch.tensor([1]))
    expected = mean(all_values() + hvd.size() * [1.5, 1.5, 1.5, 1.5, 2.5, 2.5, 3.5])
    assert extra.compute().item() == pytest.approx(expected)


@everywhere
def test_counting_continues_after_compute_until_reset() -> None:
    metric = metrics.Mean()
    for count in (1, 2):
        metric.update(torch.full((3,), float(count)))
        assert metric.compute().item() == mean([1.0, 2.0][:count])
    metric.reset()
    assert math.isnan(metric.compute().item())
    metric.update(torch.tensor(math.nan), 0)  # the loss of an empty batch
    metric.update(torch.empty(0))
    metric.update(torch.tensor([7.0]))
    assert metric.compute().item() == 7.0


@everywhere
def test_small_samples_are_not_lost_in_large_sums() -> None:
    metric = metrics.Mean()
    metric.update(torch.tensor([2.0**30, 0.25, 0.25]))  # float32 has a spacing of 64 there
    for _ in range(2):
        metric.update(torch.tensor([0.25]))
    assert metric.compute().item() == (2.0**30 + 1) / 5
    exact = metrics.Sum()
    exact.update(0.1)
    assert exact.compute().item() == pytest.approx(0.1 * hvd.size(), rel=1e-15)


@everywhere
def test_sums_keep_their_shape_and_dtype() -> None:
    numbers, vectors = metrics.Sum(dtype=torch.int64), metrics.Sum((2,))
    numbers.update(torch.full((3, 2), 2**53 + 1))
    vectors.update(torch.tensor([[1.0, 10.0]]).expand(hvd.rank(), 2))
    vectors.update(torch.tensor([0.5, 0.0]))
    ranks = sum(range(hvd.size()))
    assert numbers.compute().item() == hvd.size() * 6 * (2**53 + 1)
    assert vectors.compute().tolist() == [ranks + 0.5 * hvd.size(), 10.0 * ranks]


@everywhere
def test_a_confusion_matrix_counts_the_samples_of_all_ranks() -> None:
    matrix = metrics.ConfusionMatrix(3)
    matrix.update(torch.tensor([0, 1, 1, 2]), torch.tensor([0, 1, 2, 2], dtype=torch.uint8))
    for _ in range(hvd.rank()):
        matrix.update(torch.tensor([[1]]), torch.tensor([[0]]))
    size, extra = hvd.size(), sum(range(hvd.size()))
    assert matrix.compute().tolist() == [[size, extra, 0], [0, size, 0], [0, size, size]]


@everywhere
def test_a_class_that_does_not_exist_is_an_error_on_every_rank() -> None:
    for predicted, target in ((3, 0), (0, -1)):
        matrix = metrics.ConfusionMatrix(3)
        if hvd.rank() == 0:
            matrix.update(torch.tensor([predicted, 0]), torch.tensor([target, 0]))
        with pytest.raises(ValueError, match="at least 0 and below 3, but 1 samples are not"):
            matrix.compute()


@everywhere
def test_targets_to_ignore_do_not_count_whatever_is_predicted() -> None:
    predicted = torch.tensor([0, 1, 9, 1, 2])
    for ignored, targets, expected in (
        (-100, [0, 1, -100, -100, 1], [[1, 0, 0], [0, 1, 1], [0, 0, 0]]),
        (2, [0, 1, 2, 2, 1], [[1, 0, 0], [0, 1, 1], [0, 0, 0]]),
        (0, [0, 1, 0, 0, 0], [[0, 0, 0], [0, 1, 0], [0, 0, 0]]),
    ):
        matrix = metrics.ConfusionMatrix(3, ignore_index=ignored)
        matrix.update(predicted, torch.tensor(targets))
        assert matrix.compute().tolist() == [[hvd.size() * count for count in row] for row in expected]
    unsigned = metrics.ConfusionMatrix(3, ignore_index=-100)
    unsigned.update(torch.tensor([0]), torch.tensor([156], dtype=torch.uint8))  # -100 modulo 256
    with pytest.raises(ValueError, match="samples are not"):
        unsigned.compute()


@everywhere
def test_several_metrics_are_computed_together() -> None:
    loss, matrix = metrics.Mean(), metrics.ConfusionMatrix(2)
    loss.update(values(hvd.rank()))
    matrix.update(torch.tensor([1]), torch.tensor([0]))
    found = metrics.compute({"loss": loss, "matrix": matrix})
    assert found["loss"].item() == pytest.approx(mean(all_values()), nan_ok=True)
    assert found["matrix"].tolist() == [[0, hvd.size()], [0, 0]]
    with pytest.raises(ValueError, match="`metrics` must be one or more metrics of one process set"):
        metrics.compute({})


@pytest.mark.ranks(2, 3)
@everywhere
def test_several_metrics_are_matched_by_name() -> None:
    first, second = metrics.Mean(), metrics.Mean()
    first.update(1.0, 1)
    second.update(100.0, 1)
    named = {"first": first, "second": second}
    found = metrics.compute(named if hvd.rank() == 0 else dict(reversed(named.items())))
    assert (found["first"].item(), found["second"].item()) == (1.0, 100.0)
    with pytest.raises(hvd.CollectiveMismatchError, match=r"metrics\.compute\('other'\)"):
        metrics.compute({"other": first} if hvd.rank() == 0 else {"first": first})


@everywhere
def test_a_state_holds_the_samples_of_all_ranks_once() -> None:
    metric = metrics.Mean()
    metric.update(values(hvd.rank()))
    state = metric.state_dict()
    assert state["total"].tolist() == [sum(all_values()), len(all_values())]
    resumed = metrics.Mean()
    resumed.update(torch.ones(5))  # replaced by the loaded state
    resumed.load_state_dict(state)
    resumed.update(torch.ones(1))
    assert resumed.compute().item() == pytest.approx(mean(all_values() + [1.0] * hvd.size()))
    with pytest.raises(ValueError, match=r"of shape \(3, 3\), but has \(2,\) instead"):
        metrics.ConfusionMatrix(2).load_state_dict(state)


@everywhere
def test_a_checkpoint_holds_the_samples_of_all_ranks_once(tmp_path: Path) -> None:
    metric, path = metrics.Mean(), folder(tmp_path) / "a.pt"
    metric.update(values(hvd.rank()))
    hvd.checkpoint.save(path, {"value": 1, "metric": metric})
    resumed = metrics.Mean()
    hvd.checkpoint.load(path, {"value": 0, "metric": resumed})
    assert resumed.compute().item() == pytest.approx(mean(all_values()), nan_ok=True)


@pytest.mark.ranks(1)
@everywhere
def test_wrong_updates_are_errors() -> None:
    with pytest.raises(ValueError, match=r"update\(loss, len\(batch\)\)"):
        metrics.Mean().update(torch.tensor(1.0))
    with pytest.raises(ValueError, match="`count` must be given when"):
        metrics.Mean().update(torch.ones(3), 3)
    with pytest.raises(ValueError, match=r"end in the shape \(2,\), but has \(3,\)"):
        metrics.Sum((2,)).update(torch.ones(3))
    with pytest.raises(ValueError, match="must be integers to be added up"):
        metrics.Sum(dtype=torch.int64).update(0.5)
    with pytest.raises(ValueError, match="Take the argmax"):
        metrics.ConfusionMatrix(2).update(torch.ones(1, 2), torch.ones(1, dtype=torch.int64))


@pytest.mark.ranks(3)
@everywhere
def test_a_process_set_counts_its_own_samples() -> None:
    pair = hvd.add_process_set([0, 2])
    if pair.included():
        metric = metrics.Mean(process_set=pair)
        metric.update(values(hvd.rank()))
        state = metric.state_dict()
        metric.load_state_dict(state)
        assert metric.compute().item() == 20.5
        parts = metrics.gather_all_tensors(values(hvd.rank()), pair)
        assert [part.tolist() for part in parts] == [[], [20.0, 21.0]]
        outputs = metrics.gather_in_order(values(hvd.rank()), range(hvd.rank()), 2, process_set=pair)
        assert outputs.tolist() == [20.0, 21.0]
    hvd.remove_process_set(pair)


@everywhere
def test_tensors_of_any_shapes_are_gathered_for_torchmetrics() -> None:
    def shaped(rank: int) -> torch.Tensor:
        return torch.full((rank + 1, 2, *range(1, rank + 1)), float(rank))

    gathered = metrics.gather_all_tensors(shaped(hvd.rank()))
    assert all(torch.equal(part, shaped(rank)) for rank, part in enumerate(gathered))
    assert len(gathered) == hvd.size()
    numbers = metrics.gather_all_tensors(torch.tensor(hvd.rank()), group=None)
    assert [(number.dim(), number.item()) for number in numbers] == [(0, rank) for rank in range(hvd.size())]


@everywhere
def test_an_empty_tensor_may_have_another_dtype() -> None:
    last = hvd.size() - 1
    mine = torch.ones(2, 3, dtype=torch.int64) if hvd.rank() == last else torch.empty(0)
    gathered = metrics.gather_all_tensors(mine)
    assert torch.equal(gathered[last], torch.ones(2, 3, dtype=torch.int64))
    assert all(part.shape == (0,) and part.dtype == torch.int64 for part in gathered[:last])


@everywhere
def test_the_ranks_own_tensor_stays_in_its_graph() -> None:
    mine = torch.ones(2, requires_grad=True)
    torch.stack(metrics.gather_all_tensors(mine)).sum().backward()
    assert mine.grad is not None and mine.grad.tolist() == [1.0, 1.0]


@pytest.mark.ranks(2, 3)
@everywhere
def test_tensors_that_cannot_be_gathered_are_an_error_on_every_rank() -> None:
    mine = torch.ones(1, dtype=torch.int64 if hvd.rank() else torch.float32)
    with pytest.raises(ValueError, match="must have the same dtype"):
        metrics.gather_all_tensors(mine)
    with pytest.raises(TypeError if hvd.rank() == 1 else ValueError, match="must be a torch"):
        metrics.gather_all_tensors(None if hvd.rank() == 1 else mine)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="`indices` must be 1 integers"):
        metrics.gather_in_order(mine, [0, 1] if hvd.rank() == 1 else [0])
    with pytest.raises(ValueError, match="must have the same row shape"):
        metrics.gather_in_order(torch.ones(1, 2 + hvd.rank()), [0])
    assert hvd.allgather_object(hvd.rank()) == list(range(hvd.size()))


@pytest.mark.parametrize(("pad", "shuffle"), list(itertools.product([True, False], repeat=2)))
@everywhere
def test_outputs_are_in_dataset_order_without_duplicates(pad: bool, shuffle: bool) -> None:
    for length in (7, 1):  # with one sample, the other ranks pad or have no batch
        data = TensorDataset(torch.arange(length * 2.0).reshape(length, 2))
        sampler = hvd.DistributedSampler(data, shuffle=shuffle, pad=pad)
        outputs = [batch * 10 for (batch,) in DataLoader(data, 2, sampler=sampler)]
        result = metrics.gather_in_order(outputs, sampler, length=length)
        assert torch.equal(result, data.tensors[0] * 10)
        indices = torch.tensor(list(sampler), dtype=torch.int32)
        rows = torch.cat([torch.empty(0, 2), *outputs])
        assert torch.equal(metrics.gather_in_order(rows, indices), result)


@everywhere
def test_missing_samples_are_named_on_every_rank() -> None:
    with pytest.raises(ValueError, match=r"all 4 samples, but name 2 instead. Missing: \[1, 3\]"):
        metrics.gather_in_order(torch.zeros(2), [2, 0], length=4)
    with pytest.raises(ValueError, match="must hold a row on some rank"):
        metrics.gather_in_order([], [])


@everywhere
def test_samplers_and_seeds_use_the_ranks_of_the_world() -> None:
    rank, size = hvd.rank(), hvd.size()
    assert list(hvd.DistributedSampler(range(9), shuffle=False, pad=False)) == list(range(9))[rank::size]
    assert list(hvd.split_by_rank(range(9))) == list(range(9))[rank::size]
    state = torch.get_rng_state()
    assert hvd.seed_everything(5, rank_offset=10) == 5 + 10 * rank
    torch.set_rng_state(state)


@everywhere
def test_every_sample_is_trained_on_once_when_ranks_join() -> None:
    data = torch.arange(1.0, 2 * hvd.size() + 2)
    sampler = hvd.DistributedSampler(data, pad=False)  # the first rank has one sample more
    model: Any = torch.nn.Linear(1, 1, bias=False)
    wrapped = hvd.DistributedDataParallel(model)
    gradients = []
    with wrapped.join():
        for index in sampler:
            wrapped(data[index].view(1, 1)).sum().backward()
            gradients.append(model.weight.grad.item())
            model.weight.grad = None
    assert len(gradients) == (3 if hvd.rank() == 0 else 2)
    if hvd.rank() == 0:
        assert sum(gradients) == pytest.approx(data.sum().item() / hvd.size())


@everywhere
def test_elastic_states_keep_the_position_of_a_sampler() -> None:
    sampler = hvd.DistributedSampler(range(30))
    state = hvd.elastic.TorchState(sampler=sampler)
    shard = list(sampler)
    sampler.advance(3)
    state.save()
    sampler.advance(4)
    state.restore()
    assert list(sampler) == shard[3:]
    sampler.advance(2 if hvd.rank() == 0 else 1)
    state.sync()
    assert list(sampler) == shard[5:]
    sampler.advance(1)
    state.on_reset()
    assert list(sampler) == shard[6:]
