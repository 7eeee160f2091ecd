"""Communication hooks of torch's DistributedDataParallel, on every backend and in both styles."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
    quantization_hooks,
)
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.algorithms.ddp_comm_hooks.optimizer_overlap_hooks import (
    _hook_then_optimizer,
    _OptimizerHookState,
)
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

import dualdist as hvd
from dualdist import comm_hooks as comm_hook

from ..helpers.ranks import mean
from ..helpers.rejoining import rejoin
from ..helpers.styles import sgd, step
from ..helpers.world import everywhere

STEPS = 8


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16, bias=False), nn.ReLU(), nn.Linear(16, 4))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = STEPS) -> list[torch.Tensor]:
    """Train on data that differs between the ranks; return the weights."""
    generator = torch.Generator().manual_seed(hvd.rank())
    for _ in range(steps):
        optimizer.zero_grad()
        inputs = torch.randn(6, 8, generator=generator)
        (model(inputs) - inputs[:, :4]).square().mean().backward()
        optimizer.step()
    return [param.detach() for param in model.parameters()]


def check_equal_on_all_ranks(weights: list[torch.Tensor]) -> None:
    for weight in weights:
        rows = hvd.allgather(weight.reshape(1, -1))
        assert torch.equal(rows, rows[:1].expand_as(rows))


def power_sgd(group: Any, **options: Any) -> Any:
    return powerSGD_hook.PowerSGDState(
        group, matrix_approximation_rank=2, start_powerSGD_iter=2, min_compression_rate=0.5, **options
    )


def plain_power_sgd(group: Any) -> Any:
    return power_sgd(group, warm_start=False, use_error_feedback=False)


def post_local_sgd(group: Any) -> Any:
    return post_localSGD_hook.PostLocalSGDState(group, None, 5, post_local_gradient_allreduce=False)


def itself(group: Any) -> Any:
    return group


HOOKS: dict[str, tuple[Callable[[Any], Any], Callable[..., Any]]] = {
    "allreduce": (itself, default_hooks.allreduce_hook),
    "fp16": (itself, default_hooks.fp16_compress_hook),
    "fp16 wrapper": (power_sgd, default_hooks.fp16_compress_wrapper(powerSGD_hook.powerSGD_hook)),
    "PowerSGD": (power_sgd, powerSGD_hook.powerSGD_hook),
    "plain PowerSGD": (plain_power_sgd, powerSGD_hook.powerSGD_hook),
    "quantization per tensor": (itself, quantization_hooks.quantization_pertensor_hook),
    "noop": (itself, noop_hook),
    "post-local SGD": (post_local_sgd, post_localSGD_hook.post_localSGD_hook),
}
"""name -> (function that makes the state for a process group, None for the default group; hook)"""


@functools.cache
def gloo_group() -> Any:
    """Return a group of all ranks. It is kept: a callback of a hook may hold it in a thread of gloo, which must not
    destroy it."""
    return dist.new_group(backend="gloo")


def torch_weights(make_state: Callable[[Any], Any], hook: Callable[..., Any]) -> list[torch.Tensor]:
    """Train by torch's DistributedDataParallel over gloo."""
    model = nn.parallel.DistributedDataParallel(network(), process_group=gloo_group())
    model.register_comm_hook(make_state(gloo_group()), hook)
    return train(model, torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.parametrize("style", ["module", "optimizer"])
@pytest.mark.parametrize("name", HOOKS)
@everywhere
def test_hooks_of_torch_give_the_numbers_of_torch(name: str, style: str) -> None:
    make_state, hook = HOOKS[name]
    try:
        expected = torch_weights(make_state, hook)
    except RuntimeError:  # those of quantization work over NCCL alone in torch before 2.15
        assert "quantization" in name
        return
    model = network()
    if style == "module":
        wrapped = hvd.DistributedDataParallel(model)
        wrapped.register_comm_hook(make_state(None), hook)
        weights = train(wrapped, torch.optim.SGD(model.parameters(), lr=0.1))
    else:
        optimizer = sgd(model.parameters(), lr=0.1, comm_hook=(make_state(None), hook))
        weights = train(model, optimizer)
    # PowerSGD makes columns orthogonal, which amplifies the rounding of float16 sums in another order.
    if name != "fp16 wrapper" or hvd.size() < 3:
        for ours, theirs in zip(weights, expected, strict=True):
            # The order of a sum of three ranks may differ. In float16 each step, with a rate of 0.1, then differs by
            # the rounding of a gradient below 1.
            bound = STEPS * 0.1 * 2**-11 if "fp16" in name else 1e-5
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=bound)
    if name not in ("noop", "post-local SGD"):
        check_equal_on_all_ranks(weights)


@everywhere
def test_power_sgd_sends_fewer_bytes() -> None:
    def bytes_sent(hook: Callable[..., Any], state: Any) -> int:
        sent = 0

        def counted(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            nonlocal sent
            sent += tensor.nbytes
            return all_reduce(tensor, *args, **kwargs)

        all_reduce = dist.all_reduce
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 4, bias=False))
        torch.manual_seed(hvd.rank())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        hvd.DistributedOptimizer(optimizer, comm_hook=(state, hook))
        with mock.patch.object(dist, "all_reduce", counted):
            for _ in range(STEPS):
                optimizer.zero_grad()
                model(torch.randn(2, 64)).square().mean().backward()
                optimizer.step()
        check_equal_on_all_ranks([param.detach() for param in model.parameters()])
        return sent

    numel = 64 * 64 + 64 * 4
    assert bytes_sent(default_hooks.allreduce_hook, None) == STEPS * numel * 4
    ranks = 2 * (64 + 64) + 2 * (64 + 4)  # P and Q of both weights, of rank 2
    assert bytes_sent(powerSGD_hook.powerSGD_hook, power_sgd(None)) == (2 * numel + (STEPS - 2) * ranks) * 4


def recording(seen: list[tuple[Any, ...]]) -> Callable[..., Any]:
    """Return an allreduce hook that records the buckets."""

    def recording_hook(state: Any, bucket: Any) -> Any:
        shapes = [tuple(gradient.shape) for gradient in bucket.gradients()]
        assert shapes == [tuple(param.shape) for param in bucket.parameters()]
        assert sum(gradient.numel() for gradient in bucket.gradients()) == bucket.buffer().numel()
        seen.append((bucket.index(), shapes, bucket.is_last()))
        return default_hooks.allreduce_hook(state, bucket)

    return recording_hook


@everywhere
def test_buckets_are_combined_in_order() -> None:
    small, large = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(3, 4))
    seen: list[tuple[Any, ...]] = []
    optimizer = sgd([large, small], groups=[[large], [small]], comm_hook=recording(seen))
    for _ in range(3):
        optimizer.zero_grad()
        ((large.sum() + small.sum()) * (hvd.rank() + 1)).backward()
        assert torch.equal(small.grad, torch.full((2,), mean()))  # type: ignore[arg-type]
        assert torch.equal(large.grad, torch.full((3, 4), mean()))  # type: ignore[arg-type]
        optimizer.step()
    assert seen == 3 * [(0, [(2,)], False), (1, [(3, 4)], True)]


@everywhere
def test_buckets_have_the_sizes_of_ddp() -> None:
    # torch/nn/parallel/distributed.py: 1 MiB in the first bucket, 25 MiB in the others
    weights = [nn.Parameter(torch.zeros(1 << 16)) for _ in range(30)]  # 256 KiB each
    model = hvd.DistributedDataParallel(nn.ParameterList(weights))
    seen: list[tuple[Any, ...]] = []

    def backward() -> None:
        model.zero_grad()
        (torch.stack([weight.sum() for weight in weights]).sum() * (hvd.rank() + 1)).backward()
        for weight in weights:
            assert torch.equal(weight.grad, torch.full((1 << 16,), mean()))  # type: ignore[arg-type]

    backward()
    model.register_comm_hook(None, recording(seen))  # the buckets have been in use without a hook
    backward()
    backward()
    assert [(index, len(shapes)) for index, shapes, _ in seen] == 2 * [(0, 4), (1, 26)]


@everywhere
def test_joined_ranks_take_part() -> None:
    weight = nn.Parameter(torch.zeros(4, 4))
    optimizer = sgd([weight], comm_hook=default_hooks.allreduce_hook)
    expected = 0.0
    for number in range(2 * hvd.rank() + 1):
        optimizer.zero_grad()
        weight.sum().backward()
        optimizer.step()
        expected -= sum(number <= 2 * rank for rank in range(hvd.size())) / hvd.size()
        torch.testing.assert_close(weight.detach(), torch.full((4, 4), expected))
    hvd.join()
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()


@everywhere
def test_joined_ranks_take_part_in_power_sgd() -> None:
    model = network()
    optimizer = sgd(model.parameters(), lr=0.1, comm_hook=(power_sgd(None), powerSGD_hook.powerSGD_hook))
    train(model, optimizer, steps=3 * hvd.rank() + 4)
    last = hvd.join()
    for param in model.parameters():
        assert param.isfinite().all()
        hvd.broadcast_(param.detach(), last)
    check_equal_on_all_ranks(train(model, optimizer, steps=3))


@everywhere
def test_accumulation() -> None:
    weight = nn.Parameter(torch.zeros(3))
    optimizer = sgd([weight], backward_passes_per_step=2, comm_hook=default_hooks.allreduce_hook)
    for number in (1, 2):
        optimizer.zero_grad()
        for _ in range(2):
            (weight.sum() * (hvd.rank() + 1)).backward()
        optimizer.step()
        assert weight.tolist() == [-2 * number * mean()] * 3


@everywhere
def test_a_hook_may_leave_ranks_with_different_gradients_where_no_backward_came() -> None:
    used, by_hand = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    optimizer = sgd([used, by_hand], comm_hook=(None, noop_hook))
    for number in range(1, 4):
        optimizer.zero_grad()
        if hvd.rank() == 0:
            by_hand.grad = torch.full((1,), 2.0)
        (used * (hvd.rank() + 1)).sum().backward()
        optimizer.step()
        assert used.item() == -number * (hvd.rank() + 1)
        assert by_hand.item() == (-2 * number if hvd.rank() == 0 else 0)


@everywhere
def test_unused_parameters_stay_without_a_gradient() -> None:
    used, unused, first = (nn.Parameter(torch.zeros(2)) for _ in range(3))
    model = hvd.DistributedDataParallel(nn.ParameterList([used, unused, first]))
    model.register_comm_hook(None, default_hooks.allreduce_hook)
    loss = used.sum() + (first.sum() if hvd.rank() == 0 else 0)
    (loss * (hvd.rank() + 1)).backward()
    assert used.grad is not None and first.grad is not None and unused.grad is None
    assert used.grad.tolist() == [mean()] * 2 and first.grad.tolist() == pytest.approx([1 / hvd.size()] * 2)


@pytest.mark.ranks(2, 3)
@everywhere
def test_different_hooks_are_an_error_on_every_rank() -> None:
    model = hvd.DistributedDataParallel(nn.Linear(2, 1, bias=False))
    with pytest.raises(hvd.CollectiveMismatchError, match="comm_hook"):
        model.register_comm_hook(None, noop_hook if hvd.rank() == 0 else default_hooks.allreduce_hook)
    model.register_comm_hook(None, default_hooks.allreduce_hook)
    model(torch.full((1, 2), hvd.rank() + 1.0)).sum().backward()
    (weight,) = model.parameters()
    assert weight.grad is not None and weight.grad.tolist() == [[mean()] * 2]


@pytest.mark.ranks(2, 3)
@everywhere
def test_a_hook_of_one_rank_only_is_an_error_on_every_rank() -> None:
    model = hvd.DistributedDataParallel(nn.Linear(2, 1, bias=False))
    inputs = torch.full((1, 2), hvd.rank() + 1.0)
    with pytest.raises(hvd.CollectiveMismatchError):
        if hvd.rank() == 0:
            model.register_comm_hook(None, default_hooks.allreduce_hook)
        else:
            model(inputs).sum().backward()
    model.zero_grad()
    model(inputs).sum().backward()
    (weight,) = model.parameters()
    assert weight.grad is not None and weight.grad.tolist() == [[mean()] * 2]


@pytest.mark.ranks(2, 3)
@everywhere
def test_another_call_on_one_rank_is_an_error_and_the_next_call_works() -> None:
    weight = nn.Parameter(torch.zeros(3))
    optimizer = sgd([weight], comm_hook=default_hooks.allreduce_hook)
    with pytest.raises(hvd.CollectiveMismatchError):
        if hvd.rank() == 0:
            hvd.allreduce(torch.ones(2))
        else:
            weight.sum().backward()
    optimizer.zero_grad()
    (weight.sum() * (hvd.rank() + 1)).backward()
    assert weight.grad is not None and weight.grad.tolist() == [mean()] * 3


@everywhere
def test_wrong_hooks_are_refused() -> None:
    def returning(value: Any) -> Callable[..., Any]:
        return lambda state, bucket: value

    def optimizer(weight: nn.Parameter, **options: Any) -> Any:
        return hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), **options)

    weight = nn.Parameter(torch.zeros(3))
    for options in ({"op": hvd.Sum}, {"compression": hvd.Compression.fp16}, {"gradient_predivide_factor": 2.0}):
        with pytest.raises(ValueError, match="must not be set with `comm_hook`"):
            optimizer(weight, comm_hook=noop_hook, **options)
    model = hvd.DistributedDataParallel(nn.Linear(2, 1))
    model.register_comm_hook(None, noop_hook)
    with pytest.raises(RuntimeError, match="only once"):
        model.register_comm_hook(None, noop_hook)
    with pytest.raises(TypeError, match="`comm_hook` must be a communication hook, but is 3 instead"):
        model.register_comm_hook(None, 3)  # type: ignore[arg-type]
    kept = optimizer(weight, comm_hook=returning(3))
    with pytest.raises(TypeError, match=r"`comm_hook` must return a torch.futures.Future, but .* int instead"):
        weight.sum().backward()
    kept.zero_grad()
    too_short: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    too_short.set_result(torch.zeros(2))
    weight = nn.Parameter(torch.zeros(3))
    kept = optimizer(weight, comm_hook=returning(too_short))
    with pytest.raises(ValueError, match=r"must return a future of a tensor of shape \(3,\), but .* returned \(2,\)"):
        weight.sum().backward()
    kept.zero_grad()


@everywhere
def test_post_local_sgd_with_an_averager_of_torch() -> None:
    model = network()
    optimizer = sgd(model.parameters(), lr=0.1, comm_hook=(post_local_sgd(None), post_localSGD_hook.post_localSGD_hook))
    averager = PeriodicModelAverager(period=4, warmup_steps=5)
    for number in range(14):
        train(model, optimizer, steps=1)
        averager.average_parameters(model.parameters())
        if number < 5 or (number - 5) % 4 == 0:
            check_equal_on_all_ranks([param.detach() for param in model.parameters()])


class Descent:
    """A functional optimizer, as torch's hook expects it."""

    def step_param(self, param: torch.Tensor, grad: torch.Tensor) -> None:
        param.data.sub_(grad)


@everywhere
def test_an_optimizer_that_steps_in_the_hook() -> None:
    weight = nn.Parameter(torch.zeros(3))
    model = hvd.DistributedDataParallel(nn.ParameterList([weight]))
    state = _OptimizerHookState(Descent(), [weight])
    model.register_comm_hook(None, _hook_then_optimizer(default_hooks.allreduce_hook, state))
    for number in (1, 2):
        model.zero_grad()
        (weight.sum() * (hvd.rank() + 1)).backward()
        assert weight.tolist() == [-number * mean()] * 3


@everywhere
def test_the_state_of_a_hook_is_saved_with_checkpoints(tmp_path: Path) -> None:
    def made() -> tuple[nn.Module, Any, dict[str, Any]]:
        model, state = network(), power_sgd(None)
        optimizer = sgd(model.parameters(), lr=0.1, comm_hook=(state, powerSGD_hook.powerSGD_hook))
        return model, optimizer, {"model": model, "hook": hvd.CommHookState(state)}

    model, optimizer, objects = made()
    train(model, optimizer, steps=5)
    hvd.checkpoint.save(tmp_path / "file", objects)
    expected = train(model, optimizer, steps=4)
    model, optimizer, objects = made()
    hvd.checkpoint.load(tmp_path / "file", objects)
    for ours, theirs in zip(train(model, optimizer, steps=4), expected, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("error", [ArithmeticError, RuntimeError])
@pytest.mark.ranks(2, 3)
@everywhere
def test_a_hook_that_raises_on_one_rank_is_an_error_on_all_at_once(error: type[Exception]) -> None:
    """A RuntimeError may be of the communication, from which an elastic training recovers."""
    waiting: list[torch.futures.Future[torch.Tensor]] = []
    calls = 0

    def hook(state: Any, bucket: Any) -> Any:
        nonlocal calls
        calls += 1
        if hvd.rank() == 0:
            raise error("on purpose")
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        if calls == 1:
            waiting.append(future)
        else:
            future.set_result(bucket.buffer())
        return future

    first, second = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    optimizer = sgd([first, second], groups=[[first], [second]], comm_hook=hook)
    if hvd.rank() == 0:
        expected = hvd.HorovodInternalError if error is RuntimeError else error
        with pytest.raises(expected, match="on purpose"):
            (first.sum() + second.sum()).backward()
        assert calls == 1  # none for the second bucket
    else:
        text = f"hook failed on another rank: {error.__name__}: on purpose"
        with pytest.raises(hvd.HorovodInternalError, match=text):
            (first.sum() + second.sum()).backward()
        for future in waiting:
            future.set_result(torch.zeros(2))
    del optimizer
    rejoin()
    check_equal_on_all_ranks([torch.ones(1)])


@pytest.mark.ranks(2, 3)
@everywhere
def test_ranks_that_wait_for_one_whose_hook_has_raised_end_in_shutdown() -> None:
    def hook(state: Any, bucket: Any) -> Any:
        if hvd.rank() == 0:
            raise ArithmeticError("on purpose")
        return default_hooks.allreduce_hook(state, bucket)

    weight = nn.Parameter(torch.zeros(2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), comm_hook=hook)
    with pytest.raises((ArithmeticError, hvd.HorovodInternalError), match="on purpose"):
        weight.sum().backward()
    hvd.shutdown()
    assert "dualdist-comm-hook" not in {thread.name for thread in threading.enumerate()}
    hvd.init()
    weight = nn.Parameter(torch.zeros(2))
    optimizer = sgd([weight], comm_hook=default_hooks.allreduce_hook)
    step(optimizer, weight)
    assert weight.tolist() == [-mean()] * 2


@pytest.mark.ranks(2, 3)
@everywhere
def test_ranks_that_wait_for_one_whose_collective_has_raised_in_a_hook_of_torch_end_in_shutdown() -> None:
    def raising(*args: Any, **kwargs: Any) -> Any:
        raise ArithmeticError("on purpose")

    first, second = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    optimizer = sgd([first, second], groups=[[first], [second]], comm_hook=default_hooks.allreduce_hook)
    all_reduce = raising if hvd.rank() == 0 else dist.all_reduce
    error = ArithmeticError if hvd.rank() == 0 else hvd.HorovodInternalError
    with mock.patch.object(dist, "all_reduce", all_reduce), pytest.raises(error, match="on purpose"):
        (first.sum() + second.sum()).backward()
    del optimizer
    with mock.patch.object(comm_hook, "_LAST_HOOK_SECONDS", 0.5):
        hvd.shutdown()
    hvd.init()
    check_equal_on_all_ranks([torch.ones(1)])


@pytest.mark.parametrize("name", ["allreduce_hook", "fp16_compress_hook", "bf16_compress_hook"])
@everywhere
def test_backward_itself_calls_hooks_of_torch_that_wait_for_nothing(name: str) -> None:
    weight = nn.Parameter(torch.zeros(3))
    optimizer = sgd([weight], comm_hook=getattr(default_hooks, name))
    callers: list[threading.Thread] = []
    all_reduce = dist.all_reduce

    def recorded(*args: Any, **kwargs: Any) -> Any:
        callers.append(threading.current_thread())
        return all_reduce(*args, **kwargs)

    with mock.patch.object(dist, "all_reduce", recorded):
        for number in (1, 2):
            step(optimizer, weight)
            assert weight.tolist() == pytest.approx([-number * mean()] * 3, rel=2**-6)  # bfloat16 has 8 bits
    assert callers == 2 * [threading.current_thread()]


@pytest.mark.world_kinds("torch-mpi")
@everywhere
def test_a_hook_over_mpi_with_gradients_on_a_device_is_an_error_that_says_what_to_do_on_every_rank() -> None:
    """The device is "meta", whose tensors have no memory. MPI is not called."""

    def on_device(state: Any, bucket: Any) -> Any:
        return dist.all_reduce(bucket.buffer().to("meta"), async_op=True).get_future()

    model = hvd.DistributedDataParallel(network())
    model.register_comm_hook(None, on_device)
    with pytest.raises(
        hvd.HorovodInternalError,
        match=r"over MPI must be .* on the CPU, but is torch.strided on meta .* use the backend nccl or gloo",
    ):
        model(torch.ones(1, 8)).sum().backward()
    rejoin()
