"""broadcast_parameters and broadcast_optimizer_state: every rank starts from the numbers of the root."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import dualdist as hvd

from ..helpers.optimizers import difference
from ..helpers.world import everywhere


def make_model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 2, dtype=torch.bfloat16))


@everywhere
def test_a_state_dict_becomes_that_of_the_root() -> None:
    for root in range(hvd.size()):
        model = make_model(hvd.rank())
        hvd.broadcast_parameters(model.state_dict(), root_rank=root)
        assert difference(model.state_dict(), make_model(root).state_dict()) is None


@everywhere
def test_named_parameters_may_be_a_generator_or_a_list() -> None:
    for arrange in (iter, list):
        model = make_model(hvd.rank())
        hvd.broadcast_parameters(arrange(model.named_parameters()), root_rank=0)
        assert difference(dict(model.named_parameters()), dict(make_model(0).named_parameters())) is None
        assert all(param.requires_grad and param.grad_fn is None for param in model.parameters())


@everywhere
def test_bare_tensors_may_be_a_list() -> None:
    tensors = [torch.tensor([hvd.rank()]), torch.full((2, 2), float(hvd.rank()))]
    hvd.broadcast_parameters(tensors, root_rank=hvd.size() - 1)
    assert [tensor.flatten().tolist() for tensor in tensors] == [[hvd.size() - 1], [hvd.size() - 1.0] * 4]


@pytest.mark.parametrize("rows", [3, 300])
@everywhere
def test_every_dtype_and_memory_layout(rows: int) -> None:
    def entries(rank: int) -> dict[str, torch.Tensor]:
        table = torch.arange(12.0).reshape(3, 4) + rank
        return {
            "flags": torch.tensor([rank == 0, rank != 0]),
            "half": torch.full((3,), rank, dtype=torch.float16),
            "brain": torch.full((5,), rank, dtype=torch.bfloat16),
            "complex": torch.full((2,), complex(rank, -rank)),
            "count": torch.tensor(rank),
            "empty": torch.empty(0, 3),
            "image": torch.full((2, 3, 4, 4), float(rank)).to(memory_format=torch.channels_last),
            "transposed": table.t(),
            "columns": table[:, ::2],
            "bytes": torch.full((3,), rank, dtype=torch.uint8),
            "rows": torch.full((rows, 100), float(rank)),
        }

    mine = entries(hvd.rank())
    hvd.broadcast_parameters(mine, root_rank=0)
    assert difference(mine, entries(0)) is None
    assert mine["image"].is_contiguous(memory_format=torch.channels_last)


@everywhere
def test_large_tensors_among_many_small_ones() -> None:
    def entries(rank: int) -> list[torch.Tensor]:
        table = torch.arange(800_000.0).reshape(800, 1000) + rank
        small = [torch.full((50, 1000 + k % 2), float(rank + k)) for k in range(60)]
        return [
            *small,  # 12 MB
            table,
            table.t(),
            table[:, ::2],
            torch.full((64, 32, 9, 9), float(rank)).to(memory_format=torch.channels_last),
            torch.full((400_001,), rank + 1, dtype=torch.bfloat16),
            torch.full((100_000,), complex(rank, 1)).conj(),
            torch.full((1_000_001,), rank, dtype=torch.uint8),
            torch.tensor(rank),
            torch.full((3,), complex(1, rank)).conj().imag,  # torch negates it when it is read
            torch.full((300_000,), float(rank), requires_grad=True),
        ]

    for root in range(hvd.size()):
        mine = entries(hvd.rank())
        strides = [tensor.stride() for tensor in mine]
        hvd.broadcast_parameters(mine, root_rank=root)
        assert difference(mine, entries(root)) is None
        assert [tensor.stride() for tensor in mine] == strides


@everywhere
def test_tensors_may_be_made_in_inference_mode() -> None:
    with torch.inference_mode():
        large, small = torch.full((300, 300), float(hvd.rank())).t(), torch.full((40_000,), hvd.rank())
        scalar = torch.tensor(hvd.rank())
    root = hvd.size() - 1
    hvd.broadcast_parameters([large, small, scalar], root_rank=root)
    assert all((tensor == root).all() for tensor in (large, small, scalar))


@pytest.mark.parametrize("length", [3, 300_000])
@everywhere
def test_tensors_may_be_overwritten_before_backward(length: int) -> None:
    weight = torch.full((length,), 2.0 + hvd.rank(), requires_grad=True)
    loss = (weight * weight).sum()
    hvd.broadcast_parameters({"weight": weight}, root_rank=0)
    loss.backward()
    assert weight.grad is not None
    assert torch.equal(weight.grad, torch.full_like(weight, 4.0))


@everywhere
def test_tied_weights_stay_tied() -> None:
    encoder, decoder = nn.Linear(2, 2), nn.Linear(2, 2)
    decoder.weight = encoder.weight
    model = nn.Sequential(encoder, decoder)
    nn.init.constant_(encoder.weight, hvd.rank())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    assert decoder.weight is encoder.weight and encoder.weight.tolist() == [[0, 0], [0, 0]]


@everywhere
def test_what_is_no_parameter_is_a_value_error() -> None:
    wrong: list[Any] = [torch.ones(1), "weights", 5, nn.Sequential(nn.Linear(1, 1))]
    for params in wrong:
        with pytest.raises(ValueError, match=r"`params` must be.*Pass model\.state_dict\(\)"):
            hvd.broadcast_parameters(params, root_rank=0)
    with pytest.raises((TypeError, ValueError), match="lr"):
        hvd.broadcast_parameters({"lr": 0.1}, root_rank=0)
    hvd.broadcast_parameters({}, root_rank=0)


@pytest.mark.ranks(2, 3)
@everywhere
def test_models_that_differ_are_an_error_on_every_rank() -> None:
    model = nn.Linear(2, hvd.rank() + 1)
    with pytest.raises(hvd.CollectiveMismatchError, match="'bias', "):
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.barrier()


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("other", ["class", "groups"])
@everywhere
def test_an_optimizer_that_is_not_the_roots_is_an_error_on_every_rank(other: str) -> None:
    params, is_first = [nn.Parameter(torch.zeros(2)) for _ in range(2)], hvd.rank() == 0
    if other == "class":
        kind = torch.optim.SGD if is_first else torch.optim.Adam
        optimizer: torch.optim.Optimizer = kind(params, lr=0.1)
        shown = "SGD with groups of 2 parameters", "Adam with groups of 2 parameters"
    else:
        optimizer = torch.optim.SGD(params if is_first else [{"params": [param]} for param in params], lr=0.1)
        shown = "SGD with groups of 2 parameters", "SGD with groups of 1, 1 parameters"
    words = f"`optimizer` must be {shown[0]} as on rank 0, but is {shown[1]} instead"
    with pytest.raises(RuntimeError if is_first else ValueError, match=words):
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()


@pytest.mark.ranks(2, 3)
@everywhere
def test_optimizers_of_other_classes_are_a_mismatch() -> None:
    kind = torch.optim.SGD if hvd.rank() == 0 else torch.optim.Adam
    with pytest.raises(hvd.CollectiveMismatchError, match="Mismatched optimizer between ranks"):
        hvd.DistributedOptimizer(kind([nn.Parameter(torch.zeros(2))], lr=0.1))
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()
