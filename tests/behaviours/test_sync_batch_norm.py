"""SyncBatchNorm: the same numbers as plain BatchNorm over the concatenated batches of all ranks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import dualdist as hvd
from dualdist.core.world import current

from ..helpers.exchanges import exchanges
from ..helpers.world import everywhere

ROWS = (3, 0, 2)
"""How many samples each rank has."""
CHANNELS = 4
SHAPES = ((), (5,), (3, 2), (2, 3, 2))
"""The dimensions after (N, C)."""


def batch(rank: int, shape: tuple[int, ...], rows: tuple[int, ...] = ROWS) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(rows[rank], CHANNELS, *shape, generator=generator, dtype=torch.float64) * 3 + 2


def batches(shape: tuple[int, ...], rows: tuple[int, ...] = ROWS) -> list[torch.Tensor]:
    return [batch(rank, shape, rows) for rank in range(hvd.size())]


class Plain(nn.modules.batchnorm._BatchNorm):
    """Torch's layer for any number of dimensions."""

    def _check_input_dim(self, input: torch.Tensor) -> None:
        return


def plain(**options: Any) -> Plain:
    """Return torch's layer with weights that differ between channels."""
    layer = Plain(CHANNELS, dtype=torch.float64, **options)
    if layer.affine:
        with torch.no_grad():
            layer.weight.copy_(torch.arange(1.0, CHANNELS + 1))
            layer.bias.copy_(torch.arange(CHANNELS))
    return layer


def ours(layer: Plain) -> hvd.SyncBatchNorm:
    made = hvd.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(layer))
    assert isinstance(made, hvd.SyncBatchNorm)
    return made


def own(rows: torch.Tensor, counts: tuple[int, ...] = ROWS) -> torch.Tensor:
    parts: tuple[torch.Tensor, ...] = rows.split(list(counts[: hvd.size()]))
    return parts[hvd.rank()]


def check_state(layer: nn.Module, expected: nn.Module) -> None:
    for name, value in expected.state_dict().items():
        torch.testing.assert_close({name: layer.state_dict()[name]}, {name: value})


@pytest.mark.parametrize(
    "options", [{}, {"affine": False}, {"momentum": None}, {"track_running_stats": False}], ids=str
)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@everywhere
def test_values_gradients_and_statistics_are_those_of_the_whole_batch(
    shape: tuple[int, ...], options: dict[str, Any]
) -> None:
    expected = plain(**options)
    layer = ours(expected)
    for step in range(2):
        whole = (torch.cat(batches(shape)) + step).requires_grad_()
        mine = own(whole.detach()).requires_grad_()
        factors = torch.linspace(-1, 2, whole.numel(), dtype=torch.float64).view_as(whole)
        normal, output = expected(whole), layer(mine)
        torch.testing.assert_close(output, own(normal.detach()))
        expected.zero_grad()
        layer.zero_grad()
        (normal * factors).sum().backward()
        (output * own(factors)).sum().backward()
        assert whole.grad is not None
        torch.testing.assert_close(mine.grad, own(whole.grad))
        for param, reference in zip(layer.parameters(), expected.parameters(), strict=True):
            assert param.grad is not None
            torch.testing.assert_close(hvd.allreduce(param.grad, op=hvd.Sum), reference.grad)
        check_state(layer, expected)


def energy_and_forces(layer: nn.Module, places: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """Return a loss with the gradient of an energy in it."""
    energy = (layer(places.square()).tanh() * factors).sum()
    (forces,) = torch.autograd.grad(energy, [places], create_graph=True)
    loss: torch.Tensor = energy + (forces - 1).square().sum()
    return loss


@pytest.mark.parametrize("options", [{}, {"affine": False}], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@everywhere
def test_gradients_can_be_differentiated(shape: tuple[int, ...], options: dict[str, Any]) -> None:
    expected = plain(**options)
    layer = ours(expected)
    whole = torch.cat(batches(shape)).requires_grad_()
    mine = own(whole.detach()).clone().requires_grad_()
    factors = torch.linspace(-1, 2, whole.numel(), dtype=torch.float64).view_as(whole)
    reference = energy_and_forces(expected, whole, factors)
    loss = energy_and_forces(layer, mine, own(factors))
    torch.testing.assert_close(hvd.allreduce(loss.detach(), op=hvd.Sum), reference.detach())
    reference.backward()
    loss.backward()
    assert whole.grad is not None
    torch.testing.assert_close(mine.grad, own(whole.grad))
    for param, other in zip(layer.parameters(), expected.parameters(), strict=True):
        assert param.grad is not None
        torch.testing.assert_close(hvd.allreduce(param.grad, op=hvd.Sum), other.grad)


@everywhere
def test_a_distributed_model_trains_on_forces() -> None:
    """The gradients of the parameters are averaged once, and those of the positions are not."""
    expected, factors = plain(), torch.ones(1, dtype=torch.float64)
    rows = (2, 2, 2)
    layer = ours(expected)
    model = hvd.DistributedDataParallel(layer)
    whole = torch.cat(batches((), rows)).requires_grad_()
    energy_and_forces(expected, whole, factors).backward()
    energy_and_forces(model, own(whole.detach(), rows).clone().requires_grad_(), factors).backward()
    for param, other in zip(layer.parameters(), expected.parameters(), strict=True):
        assert other.grad is not None
        torch.testing.assert_close(param.grad, other.grad / hvd.size())


@everywhere
def test_gradients_of_weight_and_bias_are_this_ranks_share() -> None:
    whole = torch.cat(batches((3, 2)))
    layer, factors = ours(plain()), torch.linspace(-1, 2, whole.numel(), dtype=torch.float64).view_as(whole)
    (layer(own(whole)) * own(factors)).sum().backward()
    var, mean = torch.var_mean(whole, (0, 2, 3), correction=0, keepdim=True)
    normal = (own(whole) - mean) / (var + layer.eps).sqrt()
    torch.testing.assert_close(layer.weight.grad, (normal * own(factors)).sum((0, 2, 3)))
    torch.testing.assert_close(layer.bias.grad, own(factors).sum((0, 2, 3)))


@pytest.mark.not_on_devices
@pytest.mark.parametrize("param_dtype", [torch.float32, None], ids=["float32-weights", "same-weights"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@everywhere
def test_low_precision_input_is_normalized_in_float32(dtype: torch.dtype, param_dtype: torch.dtype | None) -> None:
    expected = plain()
    layer = ours(expected).to(param_dtype or dtype)
    whole = torch.cat(batches((3, 2))).to(dtype)
    mine = own(whole).clone().requires_grad_()
    output = layer(mine)
    assert output.dtype == dtype
    torch.testing.assert_close(output, own(expected(whole.double())).to(dtype))
    output.sum().backward()
    assert mine.grad is not None and mine.grad.dtype == dtype
    assert layer.weight.grad is not None and layer.weight.grad.dtype == layer.weight.dtype


@everywhere
def test_channels_last_stays_channels_last() -> None:
    expected, rows = plain(), (2, 2, 2)
    layer = ours(expected)
    whole = torch.cat(batches((3, 2), rows))
    mine = own(whole, rows).contiguous(memory_format=torch.channels_last).requires_grad_()
    output = layer(mine)
    assert output.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(output, own(expected(whole), rows))
    output.square().sum().backward()
    transposed = own(whole, rows).transpose(2, 3).contiguous().transpose(2, 3)
    torch.testing.assert_close(layer(transposed), output)


@everywhere
def test_a_large_mean_costs_no_precision() -> None:
    rows = (2, 3, 1)
    whole = torch.cat(batches((50, 2), rows))
    layer = hvd.SyncBatchNorm(CHANNELS)
    shifted = layer(own(whole + 10_000, rows).float())
    torch.testing.assert_close(shifted, own(plain(affine=False)(whole), rows).float(), atol=2e-3, rtol=0)


@everywhere
def test_evaluation_uses_the_running_statistics_without_the_others() -> None:
    layer = ours(plain())
    layer(own(torch.cat(batches((3, 2)))))
    layer.eval()
    reference = nn.BatchNorm2d(CHANNELS, dtype=torch.float64).eval()
    reference.load_state_dict(layer.state_dict())
    if hvd.rank() == 0:  # it is not collective
        data = batch(2, (3, 2))
        torch.testing.assert_close(layer(data), reference(data))


@everywhere
def test_evaluation_without_running_statistics_uses_the_own_batch() -> None:
    layer = ours(plain(track_running_stats=False)).eval()
    if hvd.rank() == 0:
        data = batch(0, (3, 2))
        expected = nn.BatchNorm2d(CHANNELS, affine=False, dtype=torch.float64)(data)
        scale, shift = (torch.arange(start, start + CHANNELS).view(-1, 1, 1) for start in (1, 0))
        torch.testing.assert_close(layer(data), expected * scale + shift)


@everywhere
def test_an_input_that_needs_no_gradient_costs_no_exchange() -> None:
    layer = ours(plain())
    output = layer(own(torch.cat(batches(()))))
    if hvd.rank() == 0:
        output.sum().backward()
        assert layer.weight.grad is not None


@everywhere
def test_fewer_than_two_values_raise_on_every_rank() -> None:
    layer = hvd.SyncBatchNorm(CHANNELS)
    rows = 1 if hvd.rank() == 0 else 0
    with pytest.raises(ValueError, match="at least two values per channel over all ranks in training, but has 1"):
        layer(torch.zeros(rows, CHANNELS))


@everywhere
def test_batches_that_are_empty_on_every_rank_change_no_statistics() -> None:
    """As with torch.nn.BatchNorm."""
    layer = hvd.SyncBatchNorm(CHANNELS)
    input = torch.zeros(0, CHANNELS, requires_grad=True)
    layer(input).sum().backward()
    assert input.grad is not None and input.grad.shape == (0, CHANNELS)
    grads = [param.grad for param in layer.parameters() if param.grad is not None]
    assert [grad.tolist() for grad in grads] == [[0.0] * CHANNELS] * 2
    mean, variance, _ = layer.buffers()
    assert (mean.tolist(), variance.tolist()) == ([0.0] * CHANNELS, [1.0] * CHANNELS)


@pytest.mark.parametrize("shape", [(3,), (2, 3), (1, 4, 1, 1, 1, 1)], ids=str)
@everywhere
def test_an_input_of_another_shape_raises(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"`input` must be \(N, 4\) with up to three more dimensions"):
        hvd.SyncBatchNorm(CHANNELS)(torch.zeros(shape))


@everywhere
def test_converting_replaces_the_layers_and_keeps_parameters_and_state() -> None:
    model = nn.Sequential(
        nn.Conv2d(1, CHANNELS, 1),
        nn.BatchNorm2d(CHANNELS, eps=0.1, momentum=None),
        nn.Sequential(nn.BatchNorm1d(3, affine=False)),
        nn.InstanceNorm2d(2),
    )
    model.eval()
    parameters = dict(model.named_parameters())
    state = copy.deepcopy(model.state_dict())
    converted = hvd.SyncBatchNorm.convert_sync_batchnorm(model)
    assert converted is model
    layer, (inner,) = model[1], model[2].children()
    assert isinstance(layer, hvd.SyncBatchNorm) and isinstance(inner, hvd.SyncBatchNorm)
    assert layer.eps == 0.1 and layer.momentum is None and not layer.training and not inner.affine
    assert type(model[3]) is nn.InstanceNorm2d
    assert all(param is parameters[name] for name, param in model.named_parameters())
    assert model.state_dict().keys() == state.keys()
    check_state(model, converted)
    again = hvd.SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm3d(2))
    assert isinstance(again, hvd.SyncBatchNorm)


@everywhere
def test_reverting_gives_the_layers_back_with_what_they_learned() -> None:
    kinds = [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d]
    model = nn.Sequential(*(kind(CHANNELS, eps=0.1, momentum=None) for kind in kinds), nn.LayerNorm(2))
    model[0] = nn.BatchNorm1d(CHANNELS, affine=False, track_running_stats=False)
    hvd.SyncBatchNorm.convert_sync_batchnorm(hvd.SyncBatchNorm.convert_sync_batchnorm(model))
    model[1](batch(0, (3, 2), (2, 2, 2)).float())
    model.eval()
    parameters, state = dict(model.named_parameters()), copy.deepcopy(model.state_dict())
    assert state["1.num_batches_tracked"] == 1
    assert hvd.SyncBatchNorm.revert_sync_batchnorm(model) is model
    assert [type(layer) for layer in model] == [*kinds, nn.LayerNorm]
    assert all(param is parameters[name] for name, param in model.named_parameters())
    assert model.state_dict().keys() == state.keys()
    check_state(model, hvd.SyncBatchNorm.revert_sync_batchnorm(copy.deepcopy(model)))
    for layer in (model[1], model[2]):
        assert layer.eps == 0.1 and layer.momentum is None and not layer.training
    with pytest.raises(ValueError, match="must have layers that convert_sync_batchnorm"):
        hvd.SyncBatchNorm.revert_sync_batchnorm(nn.Sequential(hvd.SyncBatchNorm(2)))


@pytest.mark.not_on_devices
@everywhere
def test_under_autocast_the_numbers_are_those_of_the_whole_batch() -> None:
    expected = plain().float()
    layer = ours(expected)
    whole = torch.cat(batches((3, 2))).float()
    factors = torch.linspace(-1, 2, whole.numel()).view_as(whole)
    with torch.autocast("cpu", torch.bfloat16):
        normal, output = expected(whole.bfloat16()), layer(own(whole).bfloat16())
        assert output.dtype == normal.dtype
        torch.testing.assert_close(output, own(normal))
        (normal * factors).sum().backward()
        (output * own(factors)).sum().backward()
    assert layer.weight.grad is not None and layer.weight.grad.dtype == torch.float32
    combined = hvd.allreduce(layer.weight.grad, op=hvd.Sum)
    torch.testing.assert_close(combined, expected.weight.grad, rtol=1e-2, atol=1e-2)


@pytest.mark.ranks(3)
@everywhere
def test_members_of_a_process_set_share_statistics_and_others_compute_alone() -> None:
    pair, rows = hvd.add_process_set([0, 2]), (3, 2, 1)
    layer = hvd.SyncBatchNorm.convert_sync_batchnorm(plain(), pair)
    mine = batch(hvd.rank(), (2, 2), rows).requires_grad_()
    if pair.included():
        whole = torch.cat([batch(0, (2, 2), rows), batch(2, (2, 2), rows)]).requires_grad_()
        place = slice(0, 3) if hvd.rank() == 0 else slice(3, 4)
        expected = plain()(whole)
        output = layer(mine)
        torch.testing.assert_close(output, expected[place])
        expected.square().sum().backward()
        output.square().sum().backward()
        assert whole.grad is not None
        torch.testing.assert_close(mine.grad, whole.grad[place])
    hvd.remove_process_set(pair)


@everywhere
def test_a_layer_makes_one_exchange_in_forward_and_one_in_backward() -> None:
    layer, group = hvd.SyncBatchNorm(512), current().channels[0].group
    with exchanges() as made, pytest.MonkeyPatch.context() as patch:
        for name in ("allgather", "allgatherv", "allgather_bytes", "allreduce_"):
            patch.setattr(group, name, None)
        output = layer(torch.randn(2, 512, requires_grad=True))
        assert len(made) == 1
        output.sum().backward()
        assert len(made) == 2
