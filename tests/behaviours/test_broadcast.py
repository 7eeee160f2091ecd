"""broadcast in all its forms."""

from __future__ import annotations

import pytest
import torch

import dualdist as hvd

from ..helpers.world import everywhere
from .test_allgather import DTYPES


@pytest.mark.parametrize("numel", [3, 50_000])
@everywhere
def test_every_rank_gets_the_tensor_of_the_root(numel: int) -> None:
    for root in range(hvd.size()):
        for dtype in DTYPES:
            tensor = (torch.arange(numel) % 7 + hvd.rank()).to(dtype)
            result = hvd.broadcast(tensor, root_rank=root)
            assert result.dtype == dtype
            assert torch.equal(result, (torch.arange(numel) % 7 + root).to(dtype))
            assert torch.equal(tensor, (torch.arange(numel) % 7 + hvd.rank()).to(dtype))


@everywhere
def test_in_place_returns_the_same_tensor() -> None:
    tensor = torch.full((2, 2), float(hvd.rank()))
    root = hvd.size() - 1
    assert hvd.broadcast_(tensor, root) is tensor
    assert tensor.tolist() == [[root, root], [root, root]]
    tensor.fill_(hvd.rank())
    assert hvd.synchronize(hvd.broadcast_async_(tensor, 0)) is tensor
    assert tensor.tolist() == [[0, 0], [0, 0]]


@everywhere
def test_handle_gives_a_new_tensor() -> None:
    tensor = torch.tensor([hvd.rank()])
    result = hvd.synchronize(hvd.broadcast_async(tensor, 0))
    assert result.tolist() == [0] and tensor.tolist() == [hvd.rank()]


@everywhere
def test_numbers_and_empty_tensors_keep_their_shape() -> None:
    assert hvd.broadcast(torch.tensor(float(hvd.rank())), 0).shape == ()
    assert hvd.broadcast(torch.empty(0, 2), 0).shape == (0, 2)


@pytest.mark.parametrize("width", [5, 5000])
@everywhere
def test_ranks_may_differ_in_memory_layout(width: int) -> None:
    expected = torch.arange(24.0 * width).reshape(2, 3, 4, width)
    image = expected + hvd.rank()
    held = image.to(memory_format=torch.channels_last) if hvd.rank() == 0 else image
    for root in range(hvd.size()):
        assert torch.equal(hvd.broadcast(held, root), expected + root)
    table = torch.zeros(3, 2)
    hvd.broadcast_(table[:, 1], 0)
    hvd.broadcast_(held, 0)
    assert torch.equal(held, expected)


@everywhere
def test_in_place_on_a_leaf_that_requires_grad() -> None:
    leaf = torch.full((2,), float(hvd.rank()), requires_grad=True)
    hvd.broadcast_(leaf, 0)
    assert leaf.tolist() == [0, 0] and leaf.grad_fn is None
