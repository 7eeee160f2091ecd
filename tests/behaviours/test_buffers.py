"""Buffers and other tensors of a model that are unusual: they change their size, are expanded, or have no shape yet.

torch resizes some buffers in place, such as those of quantization-aware training. A collective must not forbid it.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

import dualdist as hvd

from ..helpers.public_functions import COLLECTIVES
from ..helpers.styles import distributed
from ..helpers.world import everywhere


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    for leaf in tree_leaves(value):
        if isinstance(leaf, torch.Tensor) and leaf.layout is torch.sparse_coo:
            yield from (leaf._indices(), leaf._values())
        elif isinstance(leaf, torch.Tensor):
            yield leaf


def check_resizable(value: Any) -> None:
    tensors = list(tensors_of(value))
    assert tensors and all(tensor.untyped_storage().resizable() for tensor in tensors)


@pytest.mark.parametrize("name", [name for name, case in COLLECTIVES.items() if "obj" not in name])
@everywhere
def test_memory_can_be_resized_after_every_collective(name: str) -> None:
    arguments = COLLECTIVES[name].valid()
    result = COLLECTIVES[name].run(**arguments)
    if arguments:
        check_resizable(arguments)
        check_resizable(result if hvd.rank() == 0 or name not in ("gather", "reduce") else arguments)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bfloat16, torch.bool])
@everywhere
def test_memory_can_be_resized_after_small_reductions_of_every_dtype(dtype: torch.dtype) -> None:
    tensor = torch.ones(3).to(dtype)
    outputs = [hvd.allreduce(tensor, op=hvd.Max), hvd.grouped_allreduce([tensor, tensor], op=hvd.Sum)]
    check_resizable([tensor, outputs, hvd.allreduce_(tensor, op=hvd.Sum)])


@everywhere
def test_memory_can_be_resized_after_models_are_shared_trained_and_saved(tmp_path: Path) -> None:
    path = tmp_path / "a.pt" if hvd.rank() == 0 else Path("/dev/null/not-here")
    model = nn.Sequential(nn.Linear(3, 3), hvd.SyncBatchNorm(3), nn.BatchNorm1d(3))
    optimizer = torch.optim.Adam(model.parameters())
    wrapped = hvd.DistributedDataParallel(model)
    for _ in range(2):
        wrapped(torch.rand(2, 3)).sum().backward()
        optimizer.step()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    state = hvd.elastic.TorchState(model, optimizer, batch=torch.ones(3))
    for change in (state.sync, state.commit, state.restore):
        change()
    objects = {"model": model, "optimizer": optimizer, "mean": torch.ones(3)}
    hvd.checkpoint.save(path, objects)
    check_resizable([model.state_dict(), optimizer.state_dict(), objects["mean"], state.batch])
    hvd.checkpoint.load(path, objects)
    check_resizable([model.state_dict(), optimizer.state_dict(), objects["mean"]])


class Growing(nn.Module):
    """Counts its calls with a buffer that is longer after each."""

    seen: torch.Tensor

    def __init__(self, length: int = 0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.register_buffer("seen", torch.full((length,), float(hvd.rank())))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        length = len(self.seen)
        self.seen.resize_(length + 1)[length] = float(hvd.rank())
        return self.weight * inputs


@everywhere
def test_buffers_that_grow_in_place_are_those_of_rank_0() -> None:
    model = Growing()
    wrapped = hvd.DistributedDataParallel(model)
    for length in range(1, 4):
        wrapped(torch.ones(1)).sum().backward()
        assert model.seen.tolist() == [0.0] * (length - 1) + [hvd.rank()]
        hvd.broadcast_parameters(model.state_dict(), root_rank=hvd.size() - 1)
        assert model.seen.tolist()[-1] == hvd.size() - 1
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        model.seen.fill_(0 if hvd.rank() == 0 else 5)


@pytest.mark.ranks(2, 3)
@everywhere
def test_a_buffer_that_differs_in_size_between_ranks_is_an_error_that_names_it() -> None:
    with pytest.raises(hvd.CollectiveMismatchError, match=r"'seen', \(1,\)(.|\n)*'seen', \(0,\)|'seen', \(0,\)"):
        hvd.DistributedDataParallel(Growing(hvd.rank()))
    wrapped = hvd.DistributedDataParallel(model := Growing())
    if hvd.rank() == 0:
        model.seen.resize_(2)
    with pytest.raises(hvd.CollectiveMismatchError, match=r"'seen', \(2,\)"):
        wrapped(torch.ones(1))
    hvd.barrier()


def quantized() -> nn.Module:
    """Return a model for quantization-aware training; its buffers are empty until its first forward."""
    from torch.ao import quantization

    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 1)).train()
    weight = quantization.default_per_channel_weight_fake_quant
    model.qconfig = quantization.QConfig(activation=nn.Identity, weight=weight)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.ao is deprecated
        prepared: nn.Module = quantization.prepare_qat(model)
    return prepared


@pytest.mark.parametrize("style", ["module", "optimizer"])
@everywhere
def test_quantization_aware_training_equals_that_of_one_process(style: str) -> None:
    def train(model: nn.Module, module: nn.Module, optimizer: torch.optim.Optimizer, part: slice) -> Any:
        inputs = torch.sin(torch.arange(6 * 16.0)).view(6, 1, 4, 4)
        for step in range(4):
            optimizer.zero_grad()
            module(inputs[part] + step).square().mean().backward()
            optimizer.step()
        return model.state_dict()

    model, plain = quantized(), quantized()
    assert any(buffer.numel() == 0 for buffer in model.buffers())
    plain_optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    module, optimizer = distributed(style, model, plain_optimizer)
    found = train(model, module, optimizer, slice(hvd.rank(), None, hvd.size()))
    alone = torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.9)
    expected = train(plain, plain, alone, slice(None))
    assert not any(buffer.numel() == 0 for buffer in model.buffers())
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    model(torch.ones(1, 1, 4, 4))


@pytest.mark.parametrize("length", [4, 300_000])
@everywhere
def test_expanded_tensors_are_those_of_the_root(length: int) -> None:
    rank = float(hvd.rank())
    state = {
        "row": torch.full((1,), rank).expand(length),
        "table": torch.full((3, 1), rank + 1).expand(3, length),
        "number": torch.tensor(rank).expand(2, length),
        "plain": torch.full((2,), rank),
    }
    strides = [tensor.stride() for tensor in state.values()]
    hvd.broadcast_parameters(state, root_rank=0)
    assert [tensor.stride() for tensor in state.values()] == strides
    assert [tensor.unique().tolist() for tensor in state.values()] == [[0.0], [1.0], [0.0], [0.0]]


class WithBuffer(nn.Module):
    def __init__(self, buffer: torch.Tensor) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.register_buffer("buffer", buffer)

    def forward(self, inputs: torch.Tensor) -> Any:
        return self.layer(inputs)


@everywhere
def test_expanded_buffers_are_copied_before_each_forward() -> None:
    model: Any = WithBuffer(torch.full((1,), float(hvd.rank())).expand(4))
    wrapped = hvd.DistributedDataParallel(model)
    assert model.buffer.tolist() == [0.0] * 4
    model.buffer[:1] = hvd.rank() + 2
    wrapped(torch.ones(1, 1)).sum().backward()
    assert model.buffer.tolist() == [2.0] * 4


@everywhere
def test_tensors_without_a_shape_are_an_error_that_says_what_to_do() -> None:
    hint = "Run a forward of the model first"
    for part in (nn.LazyBatchNorm1d(), nn.LazyBatchNorm1d(affine=False), nn.LazyLinear(1)):
        with pytest.raises(ValueError, match=rf"`params\['.*'\]` must be initialized.*{hint}"):
            hvd.broadcast_parameters(part.state_dict(), root_rank=0)
    with pytest.raises(ValueError, match=rf"`params\['1.running_mean'\]` must be initialized.*{hint}"):
        hvd.DistributedDataParallel(nn.Sequential(nn.Linear(1, 1), nn.LazyBatchNorm1d(affine=False)))
    model: Any = nn.Sequential(nn.BatchNorm1d(3), nn.LazyBatchNorm1d(), nn.LazyLinear(2))
    with pytest.raises(ValueError, match="`module` must have initialized layers, but has a LazyBatchNorm1d"):
        hvd.SyncBatchNorm.convert_sync_batchnorm(model)
    assert type(model[0]) is nn.BatchNorm1d
    model(torch.rand(4, 3))
    converted = hvd.DistributedDataParallel(hvd.SyncBatchNorm.convert_sync_batchnorm(model))
    converted(torch.rand(4, 3)).sum().backward()
    lazy = hvd.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.BatchNorm1d(3), nn.LazyLinear(2)))
    assert isinstance(lazy, nn.Sequential) and isinstance(lazy[0], hvd.SyncBatchNorm)


class WithExtraState(WithBuffer):
    """A module with a state that is not a tensor."""

    def __init__(self, extra: Any) -> None:
        super().__init__(torch.full((2,), float(hvd.rank())))
        self.extra = extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = copy.deepcopy(state)


@pytest.mark.parametrize("kind", ["dictionary", "number", "none", "tensor"])
@everywhere
def test_extra_state_of_a_module_is_that_of_the_root(kind: str) -> None:
    def extra(rank: int) -> Any:
        values: dict[str, Any] = {
            "dictionary": {"steps": rank, "names": [str(rank)], "scale": torch.tensor([rank + 1.0])},
            "number": rank,
            "none": None if rank == 0 else rank,
            "tensor": torch.tensor([float(rank)]),
        }
        return values[kind]

    for model in (WithExtraState(extra(hvd.rank())), nn.Sequential(WithExtraState(extra(hvd.rank())))):
        wrapped: nn.Module
        for wrapped in (model, hvd.DistributedDataParallel(copy.deepcopy(model))):
            state = wrapped.state_dict()
            hvd.broadcast_parameters(state, root_rank=0)
            wrapped.load_state_dict(state)
            part: Any = next(part for part in wrapped.modules() if isinstance(part, WithExtraState))
            assert part.extra == extra(0)
            assert part.buffer.tolist() == [0.0, 0.0]
    module = WithExtraState(extra(hvd.rank()))
    elastic = hvd.elastic.TorchState(module)
    elastic.sync()
    assert module.extra == extra(0)
    module.extra = 5
    elastic.restore()
    assert module.extra == extra(0)


@everywhere
def test_an_extra_state_needs_a_dictionary_in_which_it_can_be_set() -> None:
    entries = list(WithExtraState({"steps": 1}).state_dict().items())
    with pytest.raises(TypeError, match=r"`params\['_extra_state'\]` must be a torch.Tensor"):
        hvd.broadcast_parameters(entries, root_rank=0)
    hvd.barrier()


@pytest.mark.ranks(2, 3)
@everywhere
def test_an_extra_state_on_one_rank_alone_is_a_mismatch() -> None:
    state: dict[str, Any] = {"weight": torch.ones(1)} | ({"_extra_state": {}} if hvd.rank() == 0 else {})
    with pytest.raises(hvd.CollectiveMismatchError, match="'_extra_state', 'object'"):
        hvd.broadcast_parameters(state, root_rank=0)
    hvd.barrier()
