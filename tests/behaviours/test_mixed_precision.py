"""DistributedDataParallel(mixed_precision=): numbers of torch's class, and parameters that keep their dtype."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel.distributed import _MixedPrecision
from torch.utils.checkpoint import checkpoint

import dualdist as hvd
from dualdist.core.world import current

from ..helpers.world import everywhere
from .test_gradient_dtypes import sent

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
ALL_BF16 = _MixedPrecision(BF16, BF16, BF16)


class Network(nn.Module):
    """Its first layer is used twice, its scale is not trained, and it has buffers."""

    def __init__(self, checkpoints: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.last = nn.Linear(4, 1)
        self.scale = nn.Parameter(torch.full((1,), 1.7), requires_grad=False)
        self.checkpoints = checkpoints
        self.seen: set[torch.dtype] = set()

    def forward(self, inputs: torch.Tensor) -> Any:
        self.seen |= {inputs.dtype, *(param.dtype for param in self.parameters())}
        hidden = self.first(inputs).tanh()
        if self.checkpoints:
            hidden = checkpoint(self.first, hidden, use_reentrant=False)
        else:
            hidden = self.first(hidden)
        return self.last(self.norm(hidden)) * self.scale


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(100 * step + rank))


def train(model: nn.Module, steps: int = 3) -> None:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        model(batch(step, hvd.rank())).square().mean().backward()
        optimizer.step()


def train_plainly(model: nn.Module, param_dtype: torch.dtype, reduce_dtype: torch.dtype) -> None:
    """Train `model` as `train` does on all ranks, by casts of whole modules."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.1, momentum=0.9)
    for step in range(3):
        sums = [torch.zeros_like(param, dtype=reduce_dtype) for param in trained]
        for rank in range(hvd.size()):
            cast = copy.deepcopy(model).to(param_dtype)
            cast(batch(step, rank).to(param_dtype)).square().mean().backward()
            grads = [p.grad for p in cast.parameters() if p.grad is not None]
            for total, grad in zip(sums, grads, strict=True):
                total += grad.to(reduce_dtype)
        for param, total in zip(trained, sums, strict=True):
            param.grad = (total / hvd.size()).float()
        optimizer.step()


@pytest.mark.parametrize("checkpoints", [False, True], ids=["", "checkpoints"])
@pytest.mark.parametrize("dtypes", [(BF16, BF16), (BF16, FP32), (FP16, FP32), (FP32, BF16)], ids=str)
@everywhere
def test_training_is_that_of_a_cast_module_with_parameters_of_float32(
    dtypes: tuple[torch.dtype, torch.dtype], checkpoints: bool
) -> None:
    model, reference = Network(checkpoints), Network()
    train(hvd.DistributedDataParallel(model, mixed_precision=_MixedPrecision(*dtypes, dtypes[0])))
    train_plainly(reference, *dtypes)
    assert model.seen == {dtypes[0]}
    for param, expected in zip(model.parameters(), reference.parameters(), strict=True):
        # Some transports add bfloat16 as float32, which rounds another way: by 2^-8 of a gradient of 1 per step.
        torch.testing.assert_close(param, expected, rtol=0, atol=2e-6 if dtypes[1] is FP32 else 1e-2)


@everywhere
def test_parameters_and_gradients_keep_their_dtype_and_buffers_are_cast_once() -> None:
    model = Network()
    wrapped = hvd.DistributedDataParallel(model, mixed_precision=ALL_BF16)
    params = list(model.parameters())
    outputs = wrapped(batch(0, hvd.rank()))
    assert outputs.dtype is BF16
    assert list(map(id, params)) == list(map(id, model.parameters()))
    outputs.sum().backward()
    assert {param.dtype for param in params} == {FP32}
    assert {param.grad.dtype for param in params if param.grad is not None} == {FP32}
    buffers = dict(model.norm.named_buffers())
    assert buffers["running_mean"].dtype is BF16
    assert torch.equal(buffers["num_batches_tracked"], torch.tensor(1))


@everywhere
def test_ignored_parameters_and_buffers_are_not_cast() -> None:
    model = nn.Sequential(Network())
    names = ["0.scale", "0.norm.running_mean"]
    hvd.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
    wrapped = hvd.DistributedDataParallel(model, mixed_precision=ALL_BF16)
    part: Any = model[0]
    buffers = dict(part.norm.named_buffers())
    assert (buffers["running_mean"].dtype, buffers["running_var"].dtype) == (FP32, BF16)
    part.norm = nn.Identity()
    assert wrapped(batch(0, hvd.rank())).dtype is FP32
    assert part.seen == {BF16, FP32}


@pytest.mark.parametrize("dtypes", [(BF16, FP32), (BF16, None), (FP32, FP16)], ids=str)
@everywhere
def test_gradients_are_sent_as_reduce_dtype(dtypes: tuple[torch.dtype, torch.dtype | None]) -> None:
    group = current().channels[0].gradients
    wrapped = hvd.DistributedDataParallel(nn.Linear(4, 4, bias=False), mixed_precision=_MixedPrecision(*dtypes))
    with sent(group) as made:
        wrapped(batch(0, hvd.rank())).sum().backward()
    expected = dtypes[1] or dtypes[0]
    expected = expected if expected in group.reduce_dtypes else FP32
    assert made == [(expected, 16 * expected.itemsize)]


@everywhere
def test_small_gradients_accumulate_in_float32() -> None:
    wrapped = hvd.DistributedDataParallel(nn.Linear(1, 1, bias=False), mixed_precision=_MixedPrecision(BF16, FP32))
    with wrapped.no_sync():
        wrapped(torch.full((1, 1), 256.0)).sum().backward()
    wrapped(torch.ones(1, 1)).sum().backward()
    param: Any = next(wrapped.parameters())
    assert param.grad.item() == 257.0  # bfloat16 has no 257


class Interrupted(nn.Linear):
    """Raises `error`, if it is not None, and calls itself while `calls` is positive."""

    error: BaseException | None = None
    calls = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.error is not None:
            raise self.error
        if self.calls:
            self.calls -= 1
            inputs = self(inputs)
        return super().forward(inputs)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@everywhere
def test_parameters_are_put_back_when_forward_raises(error: type[BaseException]) -> None:
    model = nn.Sequential(Interrupted(4, 4), nn.Linear(4, 4))
    params = list(model.parameters())
    wrapped = hvd.DistributedDataParallel(model, mixed_precision=ALL_BF16)
    part: Any = model[0]
    part.error = error()
    with pytest.raises(error):
        wrapped(batch(0, hvd.rank()))
    assert list(map(id, params)) == list(map(id, model.parameters()))
    part.error, part.calls = None, 2
    wrapped(batch(0, hvd.rank())).sum().backward()
    assert {param.grad.dtype for param in params if param.grad is not None} == {FP32}


@pytest.mark.parametrize("pickles", [False, True], ids=["deepcopy", "pickle"])
@everywhere
def test_a_copy_has_mixed_precision_too(pickles: bool) -> None:
    wrapped = hvd.DistributedDataParallel(nn.LSTM(4, 4), mixed_precision=ALL_BF16)
    wrapped(batch(0, 0))
    made = pickle.loads(pickle.dumps(wrapped)) if pickles else copy.deepcopy(wrapped)
    outputs, _ = made(batch(0, hvd.rank()))
    assert outputs.dtype is BF16
    outputs.sum().backward()
    assert {param.grad.dtype for param in made.parameters() if param.grad is not None} == {FP32}


@everywhere
def test_mixed_precision_has_no_communication_hook() -> None:
    wrapped = hvd.DistributedDataParallel(nn.Linear(4, 1), mixed_precision=ALL_BF16)
    with pytest.raises(RuntimeError, match="mixed_precision"):
        wrapped.register_comm_hook(None, lambda state, bucket: None)


@everywhere
def test_dtypes_that_are_no_smaller_floats_are_refused() -> None:
    for name in ("param_dtype", "reduce_dtype", "buffer_dtype"):
        with pytest.raises(ValueError, match=f"`mixed_precision.{name}` must be"):
            hvd.DistributedDataParallel(nn.Linear(4, 1), mixed_precision=_MixedPrecision(**{name: torch.int32}))
