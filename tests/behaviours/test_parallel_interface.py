"""DistributedDataParallel has the arguments and attributes of torch's class, and frameworks take it for that class."""

from __future__ import annotations

import contextlib
import copy
import gc
import inspect
import warnings
import weakref
from typing import Any, cast

import pytest
import torch
from torch import nn

import dualdist as hvd

from ..helpers.world import everywhere


def linear(size: int = 1) -> Any:
    return nn.Linear(size, size, bias=False)


def mean_of_ranks(wrapped: nn.Module, error: float = 0.0) -> None:
    """Check that gradients are averaged over all ranks, to a relative `error`."""
    wrapped.zero_grad()
    wrapped(torch.full((1, 1), hvd.rank() + 1.0)).sum().backward()
    param: Any = next(wrapped.parameters())
    assert param.grad.item() == pytest.approx((hvd.size() + 1) / 2, rel=error, abs=0.0)


@everywhere
def test_a_wrapper_passes_for_that_of_torch_and_has_its_attributes() -> None:
    from torch.distributed.algorithms.join import Joinable

    wrapped: Any = hvd.DistributedDataParallel(linear(), device_ids=[torch.device("cpu")], static_graph=True)
    assert wrapped.device == torch.device("cpu") and wrapped.device_type == "cpu"
    assert wrapped.device_ids == [torch.device("cpu")]
    assert wrapped.broadcast_buffers and wrapped.forward_sync_buffers
    assert wrapped.require_backward_grad_sync
    with wrapped.no_sync():
        assert not wrapped.require_backward_grad_sync
    assert wrapped.static_graph and not wrapped.find_unused_parameters
    assert wrapped.parameters_to_ignore == set()
    facts = wrapped._get_ddp_logging_data()
    assert (facts["world_size"], facts["rank"]) == (hvd.size(), hvd.rank())
    assert (facts["module_name"], facts["num_parameter_tensors"]) == ("Linear", 1)
    assert facts["total_parameter_size_bytes"] == 4 and facts["dtypes"] == "float32"
    assert isinstance(wrapped, torch.nn.parallel.DistributedDataParallel) and isinstance(wrapped, Joinable)
    assert not isinstance(linear(), torch.nn.parallel.DistributedDataParallel)


@pytest.mark.world_kinds("torch-gloo")
@everywhere
def test_public_names_of_torchs_class_exist() -> None:
    own = torch.nn.parallel.DistributedDataParallel(linear())
    wrapped: Any = hvd.DistributedDataParallel(linear())
    public = {name for name in dir(own) if not name.startswith("_")}
    assert public - set(dir(wrapped)) <= {"scatter", "gather", "to_kwargs", "logger"}
    with pytest.raises(RuntimeError, match="gradients are complete when backward returns"):
        wrapped.require_manual_backward_finalization = True
    assert not wrapped.require_manual_backward_finalization
    assert not wrapped.will_sync_module_buffers() and wrapped.modules_buffers == []


@pytest.mark.parametrize("steps_before", [0, 3])
@pytest.mark.ranks(2, 3)
@everywhere
def test_the_wrapper_of_torch_around_one_changes_no_number(steps_before: int) -> None:
    model = nn.Sequential(*(linear() for _ in range(5)))
    wrapped: Any = hvd.DistributedDataParallel(model, bucket_cap_mb=1e-6)  # a bucket for each layer
    inputs = torch.arange(6.0).view(6, 1) * (hvd.rank() + 1)
    plain = copy.deepcopy(model)

    def step(model: nn.Module) -> None:
        model.zero_grad()
        with getattr(model, "no_sync", contextlib.nullcontext)():
            model(inputs).square().sum().backward()
        model(inputs).square().sum().backward()

    def train(model: nn.Module, steps: int) -> None:
        for _ in range(steps):
            model.zero_grad()
            model(inputs).square().sum().backward()

    train(wrapped, steps_before)
    outer: Any = torch.nn.parallel.DistributedDataParallel(wrapped)
    for run in (lambda model: train(model, 3), step):
        run(outer)
        run(plain)
        for param, alone in zip(outer.parameters(), plain.parameters(), strict=True):
            assert torch.allclose(param.grad, hvd.allreduce(cast(torch.Tensor, alone.grad), op=hvd.Average), rtol=1e-5)


@everywhere
def test_a_model_is_wrapped_in_one_style_only() -> None:
    model = linear()
    wrapped: Any = hvd.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with pytest.raises(TypeError, match="must not have parameters of a DistributedDataParallel"):
        hvd.DistributedOptimizer(optimizer)
    del wrapped
    distributed = hvd.DistributedOptimizer(optimizer)
    with pytest.raises(TypeError, match="must not have parameters of a DistributedOptimizer"):
        hvd.DistributedDataParallel(model)
    del distributed, optimizer
    mean_of_ranks(hvd.DistributedDataParallel(model))


@pytest.mark.ranks(2, 3)
@everywhere
def test_sync_batch_norm_of_torch_is_refused_in_both_styles() -> None:
    model: nn.Module = nn.Sequential(nn.Linear(1, 2), nn.SyncBatchNorm(2))
    with pytest.raises(ValueError, match=r"hvd\.SyncBatchNorm\.convert_sync_batchnorm"):
        hvd.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with pytest.raises(ValueError, match=r"hvd\.SyncBatchNorm\.convert_sync_batchnorm"):
        hvd.DistributedOptimizer(optimizer)
    model = hvd.SyncBatchNorm.convert_sync_batchnorm(model)
    hvd.DistributedOptimizer(optimizer)
    model(torch.arange(2.0).view(2, 1)).sum().backward()


@everywhere
def test_what_cannot_be_wrapped_is_refused_and_the_next_model_works() -> None:
    class DTensor(nn.Parameter):
        """Has the name of torch's class."""

    sharded = linear()
    sharded._parameters["weight"] = DTensor(torch.ones(1, 1))
    with pytest.raises(TypeError, match="'weight' is a DTensor"):
        hvd.DistributedDataParallel(sharded)
    with pytest.raises(TypeError, match=r"must not be a torch\.nn\.DataParallel"):
        hvd.DistributedDataParallel(nn.Sequential(nn.DataParallel(linear())))
    with pytest.raises(RuntimeError, match="'weight' has no shape yet"):
        hvd.DistributedDataParallel(nn.LazyLinear(1))
    for model in (nn.Tanh(), linear().requires_grad_(False)):
        with pytest.raises(RuntimeError, match="must have a parameter that requires a gradient"):
            hvd.DistributedDataParallel(model)
    mean_of_ranks(hvd.DistributedDataParallel(linear()))


@everywhere
def test_parameters_and_buffers_can_be_left_alone() -> None:
    class Counted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = linear(), linear()
            self.register_buffer("own", torch.full((1,), float(hvd.rank())))
            self.register_buffer("shared", torch.full((1,), float(hvd.rank())))

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return self.first(inputs) + self.second(inputs)  # type: ignore[no-any-return]

    model: Any = Counted()
    nn.init.constant_(model.first.weight, float(hvd.rank()))
    ignored = ["first.weight", "own"]
    hvd.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
    wrapped: Any = hvd.DistributedDataParallel(model)
    assert model.first.weight.item() == model.own.item() == hvd.rank()
    assert model.shared.item() == 0.0
    wrapped(torch.full((1, 1), hvd.rank() + 1.0)).sum().backward()
    assert model.own.item() == hvd.rank()
    assert model.first.weight.grad.item() == hvd.rank() + 1.0
    assert model.second.weight.grad.item() == (hvd.size() + 1) / 2
    (param,) = wrapped._get_data_parallel_params(model)
    assert param is model.second.weight


def made(model: nn.Module, **options: Any) -> Any:
    """Wrap `model`. torch 2.13 and later warn of `broadcast_buffers`."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated in torch", FutureWarning)
        return hvd.DistributedDataParallel(model, **options)


@pytest.mark.parametrize(
    ("options", "copies"),
    [
        ({"broadcast_buffers": False}, (False, False)),
        ({"forward_sync_buffers": False}, (True, False)),
        ({"forward_sync_buffers": True}, (True, True)),
        ({}, (True, True)),
    ],
)
@everywhere
def test_buffers_are_copied_at_the_start_or_before_each_forward(
    options: dict[str, Any], copies: tuple[bool, bool]
) -> None:
    model: Any = nn.BatchNorm1d(1, momentum=0.0)
    for copied, step in zip(copies, ("start", "forward"), strict=True):
        own = hvd.rank() + 5.0
        model.running_mean.fill_(own)
        if step == "start":
            wrapped = made(model, **options)
        else:
            wrapped(torch.ones(2, 1))
        assert model.running_mean.item() == (5.0 if copied else own)


@everywhere
def test_an_argument_that_torch_deprecates_warns_and_its_successor_counts() -> None:
    own = inspect.signature(torch.nn.parallel.DistributedDataParallel.__init__)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        hvd.DistributedDataParallel(linear(), broadcast_buffers=True)
    assert len(caught) == int("forward_sync_buffers" in own.parameters)
    with pytest.warns(FutureWarning, match="`broadcast_buffers` is ignored"):
        wrapped = hvd.DistributedDataParallel(linear(), broadcast_buffers=True, forward_sync_buffers=False)
    assert not wrapped.forward_sync_buffers


def counted() -> Any:
    """Return a model with a buffer that differs between ranks."""
    model = linear()
    model.register_buffer("count", torch.full((1,), float(hvd.rank())))
    return model


@pytest.mark.parametrize("place", ["PRE_FORWARD", "POST_FORWARD"])
@pytest.mark.parametrize("returns_futures", [True, False])
@everywhere
def test_a_hook_synchronizes_buffers(place: str, returns_futures: bool) -> None:
    import torch.distributed as dist
    from torch.nn.parallel.distributed import _BufferCommHookLocation

    def hook(state: str, buffers: dict[str, torch.Tensor]) -> Any:
        assert state == "state" and list(buffers) == ["count"]
        future = dist.all_reduce(buffers["count"], async_op=True).get_future()
        return [future] if returns_futures else future.wait() and None

    model = counted()
    wrapped: Any = hvd.DistributedDataParallel(model)
    wrapped._register_buffer_comm_hook("state", hook, _BufferCommHookLocation[place])
    for step in (1, 2):
        loss = wrapped(torch.ones(1, 1)).sum()
        loss.backward()
        assert model.count.item() == 0.0  # rank 0's was copied at the start
        model.count.fill_(float(step))
        wrapped(torch.ones(1, 1)).sum().backward()
        assert model.count.item() == step * hvd.size()
        model.count.zero_()
    wrapped.eval()
    model.count.fill_(3.0)
    wrapped(torch.ones(1, 1))
    assert model.count.item() == 3.0
    with pytest.raises(TypeError, match="`hook` must be a function"):
        wrapped._register_buffer_comm_hook(None, 3)


@everywhere
def test_a_hook_can_copy_buffers_as_without_a_hook() -> None:
    model = counted()
    wrapped: Any = hvd.DistributedDataParallel(model, init_sync=False)
    wrapped._register_buffer_comm_hook(
        wrapped, lambda wrapper, buffers: wrapper._default_broadcast_coalesced(list(buffers.values()))
    )
    wrapped(torch.ones(1, 1)).sum().backward()
    assert model.count.item() == 0.0
    reference = weakref.ref(wrapped)
    del wrapped
    gc.collect()
    assert reference() is None


@everywhere
def test_built_in_hooks_of_torch_average() -> None:
    from torch.distributed import BuiltinCommHookType

    rounding = torch.finfo(torch.float16).eps  # it divides before it sums
    for kind, error in ((BuiltinCommHookType.ALLREDUCE, 0.0), (BuiltinCommHookType.FP16_COMPRESS, rounding)):
        wrapped: Any = hvd.DistributedDataParallel(linear())
        assert "comm_hook" not in wrapped._get_ddp_logging_data()
        wrapped._register_builtin_comm_hook(kind)
        assert wrapped._get_ddp_logging_data()["comm_hook"] == str(kind)
        mean_of_ranks(wrapped, error)
    with pytest.raises(TypeError, match="`comm_hook_type` must be one of"):
        wrapped._register_builtin_comm_hook("allreduce")


@everywhere
def test_a_fused_optimizer_steps_in_backward() -> None:
    model = linear()
    wrapped: Any = hvd.DistributedDataParallel(model)
    nn.init.zeros_(model.weight)
    with warnings.catch_warnings(record=True):  # torch always warns of functional optimizers
        wrapped._register_fused_optim(torch.optim.SGD, 1.0)
    for step in (1, 2):
        mean_of_ranks(wrapped)
        assert model.weight.item() == -step * (hvd.size() + 1) / 2


@everywhere
def test_a_wrapper_without_hooks_averages_no_more() -> None:
    model = linear()
    wrapped: Any = hvd.DistributedDataParallel(model)
    wrapped._remove_autograd_hooks()
    wrapped(torch.full((1, 1), hvd.rank() + 1.0)).sum().backward()
    assert model.weight.grad.item() == hvd.rank() + 1.0
    again: Any = hvd.DistributedDataParallel(model)
    again._set_ddp_sink_clone(False)
    mean_of_ranks(again)


@pytest.mark.parametrize(
    "options",
    [
        {"bucket_cap_mb_list": [1e-5, 1e-3]},
        {"skip_all_reduce_unused_params": True, "batched_grad_copy": True, "lazy_bucket_allocation": True},
        {"gradient_as_bucket_view": True, "find_unused_parameters": True},
    ],
)
@everywhere
def test_options_for_speed_do_not_change_the_gradients(options: dict[str, Any]) -> None:
    model = nn.Sequential(*(linear(2) for _ in range(4)))
    reference = nn.Sequential(*(linear(2) for _ in range(4)))
    wrapped: Any = hvd.DistributedDataParallel(model, **options)
    reference.load_state_dict(model.state_dict())
    for step in range(2):
        rows = [torch.full((1, 2), float(rank + step)) for rank in range(hvd.size())]
        wrapped.zero_grad()
        reference.zero_grad()
        wrapped(rows[hvd.rank()]).sum().backward()
        torch.stack([reference(row).sum() for row in rows]).mean().backward()
        for param, expected in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(param.grad, expected.grad)


@everywhere
def test_delayed_parameters_are_averaged_too() -> None:
    model: Any = nn.Sequential(linear(), linear())
    wrapped: Any = hvd.DistributedDataParallel(
        model, delay_all_reduce_named_params=[("1.weight", model[1].weight)], param_to_hook_all_reduce=model[0].weight
    )
    with torch.no_grad():
        model[0].weight.fill_(1.0)
        model[1].weight.fill_(1.0)
    with pytest.raises(ValueError, match="`delay_all_reduce_named_params` must be a list"):
        other = linear()
        hvd.DistributedDataParallel(
            linear(), delay_all_reduce_named_params=[("0", other.weight)], param_to_hook_all_reduce=other.weight
        )
    mean_of_ranks(wrapped)
    assert model[1].weight.grad.item() == (hvd.size() + 1) / 2


@everywhere
def test_optimizers_in_backward_use_averaged_gradients() -> None:
    from torch.distributed.optim import _apply_optimizer_in_backward

    for wraps_first in (True, False):
        model = linear()
        nn.init.zeros_(model.weight)
        wrapped: Any = hvd.DistributedDataParallel(model) if wraps_first else None
        _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 1.0})
        wrapped = wrapped or hvd.DistributedDataParallel(model)
        with wrapped.no_sync():
            wrapped(torch.zeros(1, 1)).sum().backward()
        assert model.weight.grad.item() == model.weight.item() == 0.0
        for step in (1, 2):
            wrapped(torch.full((1, 1), hvd.rank() + 1.0)).sum().backward()
            assert model.weight.grad is None
            assert model.weight.item() == -step * (hvd.size() + 1) / 2


@everywhere
def test_the_next_backward_decides_whether_gradients_are_averaged() -> None:
    model = linear()
    wrapped: Any = hvd.DistributedDataParallel(model)
    inputs = torch.full((1, 1), hvd.rank() + 1.0)
    with wrapped.no_sync():
        loss = wrapped(inputs).sum()
    loss.backward()
    assert model.weight.grad.item() == (hvd.size() + 1) / 2
    wrapped.zero_grad()
    wrapped.module(inputs).sum().backward()
    assert model.weight.grad.item() == (hvd.size() + 1) / 2
    wrapped.zero_grad()
    loss = wrapped(inputs).sum()
    with wrapped.no_sync():
        loss.backward()
    assert model.weight.grad.item() == hvd.rank() + 1.0


@everywhere
def test_a_second_backward_of_one_forward_is_averaged_too() -> None:
    model = linear()
    wrapped: Any = hvd.DistributedDataParallel(model)
    loss = wrapped(torch.full((1, 1), hvd.rank() + 1.0)).sum()
    for number in range(1, 3):
        loss.backward(retain_graph=True)
        assert model.weight.grad.item() == number * (hvd.size() + 1) / 2


@everywhere
def test_groups_and_meshes_of_torch_are_taken() -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    for options in (
        {"process_group": dist.group.WORLD},
        {"process_group": dist.new_group()},
        {"device_mesh": init_device_mesh("cpu", (hvd.size(),))},
    ):
        wrapped = hvd.DistributedDataParallel(linear(), **options)
        assert dist.get_process_group_ranks(wrapped.process_group) == list(range(hvd.size()))
        mean_of_ranks(wrapped)
    assert hvd.DistributedDataParallel(linear()).process_group is dist.group.WORLD
    with pytest.raises(ValueError, match="`device_mesh` must be None"):
        mesh = init_device_mesh("cpu", (hvd.size(),))
        hvd.DistributedDataParallel(linear(), process_group=dist.group.WORLD, device_mesh=mesh)


@pytest.mark.ranks(3)
@everywhere
def test_a_group_of_torch_averages_among_its_members() -> None:
    import torch.distributed as dist

    pair = dist.new_group([0, 2])
    if hvd.rank() == 1:
        return
    model: Any = nn.Sequential(linear(), hvd.SyncBatchNorm(1, process_group=pair))
    for _ in range(2):
        wrapped = hvd.DistributedDataParallel(model, process_group=pair)
        wrapped.zero_grad()
        wrapped(torch.full((2, 1), hvd.rank() + 1.0)).square().sum().backward()
        assert model[1].bias.grad.item() == pytest.approx(0.0, abs=1e-5)
        plain: Any = hvd.DistributedDataParallel(linear(), process_group=pair)
        plain(torch.full((1, 1), hvd.rank() + 1.0)).sum().backward()
        assert plain.module.weight.grad.item() == 2.0
        del wrapped
