"""What a training script can get wrong: one clear error on every rank, which names the first difference."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

import dualdist as hvd

from ..helpers.ranks import check_next_calls_work, is_last
from ..helpers.styles import STYLES, distributed, step
from ..helpers.world import everywhere


def of(**sizes: int) -> nn.ParameterDict:
    made = nn.ParameterDict()
    for name, size in sizes.items():  # one by one: it sorts what it is given at once
        made[name] = nn.Parameter(torch.zeros(size))
    return made


# The model of the last rank where all others have of(a=1, b=2, c=3), and the first difference.
DIFFERENT: dict[str, tuple[Callable[[], nn.Module], str, str]] = {
    "name": (lambda: of(a=1, bb=2, c=3), "'b', (2,)", "'bb', (2,)"),
    "shape": (lambda: of(a=1, b=4, c=5), "'b', (2,)", "'b', (4,)"),
    "order": (lambda: of(a=1, c=3, b=2), "'b', (2,)", "'c', (3,)"),
    "dtype": (lambda: nn.ParameterDict({**of(a=1), **of(b=2).half(), **of(c=3)}), "float32", "float16"),
    "number": (lambda: of(a=1), "'b', (2,)", "=nothing"),
}


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("difference", DIFFERENT)
@everywhere
def test_the_first_parameter_that_differs_is_named(difference: str, style: str) -> None:
    odd, theirs, ours = DIFFERENT[difference]
    with pytest.raises(hvd.CollectiveMismatchError, match="Mismatched parameters between ranks") as caught:
        model = odd() if is_last() else of(a=1, b=2, c=3)
        distributed(style, model, torch.optim.SGD(model.parameters(), lr=1.0))
    first, mine, *_ = (line for line in str(caught.value).splitlines() if "parameters[1]" in line)
    assert theirs in first and ours in mine and f"rank {hvd.size() - 1} called" in mine
    assert "'a'" not in str(caught.value)
    check_next_calls_work()


def moved(model: nn.Module) -> None:
    model.double()


def replaced(model: Any) -> None:
    model[0].weight = nn.Parameter(torch.zeros(1, 1))


def assigned(model: nn.Module) -> None:
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)


def exchanged(model: Any) -> None:
    model[0] = nn.Linear(1, 1, bias=False)


def lengthened(model: Any) -> None:
    model.append(nn.Linear(1, 1, bias=False))


MOVED = "'0.weight' changed from torch.float32 on cpu to torch.float64 on cpu"
CHANGES = {
    "optimizer, moved": (moved, MOVED),
    "module, moved": (moved, MOVED),
    "module, replaced": (replaced, "'0.weight' is now a different parameter"),
    "module, assigned": (assigned, "'0.weight' is now a different parameter"),
    "module, exchanged": (exchanged, "'0.weight' is now a different parameter"),
    "module, lengthened": (lengthened, "'1.weight' is now a different parameter"),
}


@pytest.mark.parametrize("who", ["all", "one"])
@pytest.mark.parametrize("case", CHANGES)
@everywhere
def test_a_model_that_is_changed_after_wrapping_is_an_error_on_every_rank(case: str, who: str) -> None:
    change, words = CHANGES[case]
    model = nn.Sequential(nn.Linear(1, 1, bias=False))
    style, _ = case.split(", ")
    wrapped, optimizer = distributed(style, model, torch.optim.SGD(model.parameters(), lr=1.0))
    changed = who == "all" or is_last()
    for number in range(2):
        if changed and number == 1:
            change(model)
        optimizer.zero_grad()
        dtype = next(model.parameters()).dtype

        def work(dtype: torch.dtype = dtype) -> None:
            wrapped(torch.ones(1, 1, dtype=dtype)).sum().backward()

        if number == 0:
            work()
            optimizer.step()
        elif changed:
            with pytest.raises(ValueError, match="must not change after it was made") as caught:
                work()
            assert words in str(caught.value) and "Move or change the model first" in str(caught.value)
        else:
            with pytest.raises(hvd.HorovodInternalError, match=rf"on ranks \[{hvd.size() - 1}\]"):
                work()
    check_next_calls_work()


@everywhere
def test_a_gradient_of_another_shape_is_an_error_on_every_rank() -> None:
    weight = nn.Parameter(torch.zeros(2, 3))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), [("weight", weight)])
    weight.grad = torch.ones(2, 3)
    if is_last():
        weight.grad.data = torch.ones(5)
        with pytest.raises(ValueError, match=r"the gradient of 'weight' is \(5,\), torch.float32 on cpu"):
            optimizer.step()
    else:
        with pytest.raises(hvd.HorovodInternalError, match=rf"on ranks \[{hvd.size() - 1}\]"):
            optimizer.step()
    assert weight.tolist() == [[0.0] * 3] * 2
    optimizer.zero_grad()
    check_next_calls_work()


@everywhere
def test_a_module_is_wrapped_once() -> None:
    wrapped = hvd.DistributedDataParallel(nn.Linear(1, 1))
    for module in (wrapped, nn.Sequential(wrapped)):
        with pytest.raises(TypeError, match="`module` must not be distributed already"):
            hvd.DistributedDataParallel(module)


@everywhere
def test_a_module_may_have_scripted_parts() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # TorchScript is deprecated
        scripted = torch.jit.script(nn.Linear(1, 1))
    wrapped = hvd.DistributedDataParallel(nn.Sequential(scripted))
    for _ in range(2):
        scripted.zero_grad()
        wrapped(torch.full((1, 1), hvd.rank() + 1.0)).sum().backward()
        assert scripted.weight.grad.item() == (hvd.size() + 1) / 2


@everywhere
def test_device_ids_must_be_the_device_of_the_module() -> None:
    for device in (0, torch.device("cuda:0")):
        with pytest.raises(ValueError, match=rf"`device_ids` must be .* but is \[{device}\] .* are on cpu"):
            hvd.DistributedDataParallel(nn.Linear(1, 1), device_ids=[device])
    spread = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1, device="meta"))
    with pytest.raises(ValueError, match=r"`device_ids` must be .* are on cpu, meta"):
        hvd.DistributedDataParallel(spread, device_ids=[torch.device("cpu")])
    wrapped = hvd.DistributedDataParallel(nn.Linear(1, 1), device_ids=[])
    wrapped(torch.ones(1, 1)).sum().backward()


class Lookahead(torch.optim.Optimizer):
    """Like several public ones: another optimizer, without `super().__init__()`."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.param_groups = inner, inner.param_groups
        self.slow = [param.detach().clone() for group in self.param_groups for param in group["params"]]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step(closure)
        for slow, fast in zip(self.slow, self.param_groups[0]["params"], strict=True):
            fast.data.copy_(slow.lerp_(fast.detach(), 0.5))


@everywhere
def test_an_optimizer_that_torch_has_not_initialized_is_refused_and_left_as_it_is() -> None:
    weight = nn.Parameter(torch.zeros(1))
    outer = Lookahead(torch.optim.SGD([weight], lr=1.0))
    with pytest.raises(TypeError, match=r"Lookahead\.__init__ does not .*: Lookahead\(DistributedOptimizer\(inner"):
        hvd.DistributedOptimizer(outer)
    assert type(outer) is Lookahead
    outer = Lookahead(hvd.DistributedOptimizer(outer.inner))
    weight.mul(hvd.rank() + 1.0).sum().backward()
    outer.step()
    assert weight.item() == -(hvd.size() + 1) / 4


@pytest.mark.world_kinds("torch-gloo")
@everywhere
def test_dtensors_are_refused_by_name() -> None:
    from torch.distributed.device_mesh import init_device_mesh

    from ..helpers.dtensors import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (hvd.size(),))
    sharded = nn.Parameter(distribute_tensor(torch.ones(2 * hvd.size()), mesh, [Shard(0)]))
    for collective in (hvd.allreduce, hvd.allgather, lambda tensor: hvd.broadcast(tensor, 0)):
        with pytest.raises(TypeError, match="`tensor` must be a plain tensor, but is a DTensor"):
            collective(sharded)
    with pytest.raises(TypeError, match=r"`params\['weight'\]` must be a plain tensor, but is a DTensor"):
        hvd.broadcast_parameters({"weight": sharded}, 0)
    check_next_calls_work()


@pytest.mark.ranks(2, 3)
@everywhere
def test_an_optimizer_that_could_not_be_wrapped_can_be_wrapped_again() -> None:
    weight = nn.Parameter(torch.zeros(1))
    optimizer: Any = torch.optim.SGD([weight], lr=1.0)
    with pytest.raises(ValueError, match="`gradient_predivide_factor` must be"):
        hvd.DistributedOptimizer(optimizer, gradient_predivide_factor=0)
    with pytest.raises(hvd.CollectiveMismatchError, match="prescale_factor"):
        hvd.DistributedOptimizer(optimizer, gradient_predivide_factor=2.0 if is_last() else 1.0)
    optimizer = hvd.DistributedOptimizer(optimizer)
    step(optimizer, weight)
    assert weight.item() == -(hvd.size() + 1) / 2


@pytest.mark.ranks(2, 3)
@everywhere
def test_parameters_that_one_rank_alone_adds_are_an_error_on_every_rank() -> None:
    weight, more = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(3))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0))
    for turn in range(3):
        with pytest.raises(hvd.CollectiveMismatchError) if turn == 1 else nullcontext():
            if turn == 1 and is_last():
                optimizer.add_param_group({"params": [more]})
            step(optimizer, weight)
    assert len(optimizer.param_groups) == 1
    assert weight.item() == -(hvd.size() + 1)
    check_next_calls_work()


@pytest.mark.parametrize("comm_hook", [None, allreduce_hook])
@everywhere
def test_a_backward_that_failed_is_not_repeated_on_top_of_what_it_has_sent(comm_hook: Any) -> None:
    hvd.shutdown()  # no wrapper of another test may be older: this one would send late
    hvd.init()
    model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(3)])
    wrapped = hvd.DistributedDataParallel(model, bucket_cap_mb=1e-5)
    if comm_hook is not None:
        wrapped.register_comm_hook(None, comm_hook)

    def backward() -> None:
        wrapped(torch.ones(1, 2)).sum().backward()

    backward()
    model.zero_grad()
    hook = model[1].register_full_backward_hook(fail)
    with pytest.raises(MemoryError):
        backward()
    hook.remove()
    with pytest.raises(RuntimeError, match=r"was sent before its backward was complete.*zero_grad\("):
        backward()
    model.zero_grad()
    backward()
    expected = torch.autograd.grad(model(torch.ones(1, 2)).sum(), list(model.parameters()))
    torch.testing.assert_close([param.grad for param in model.parameters()], list(expected))
    check_next_calls_work()


def fail(*_: object) -> None:
    raise MemoryError


@pytest.mark.ranks(2, 3)
@everywhere
def test_a_backward_that_one_rank_repeats_alone_is_an_error_on_every_rank() -> None:
    for _ in range(2):
        repeat_a_backward_on_rank_0()
        hvd.shutdown()
        hvd.init()
        check_next_calls_work()


def repeat_a_backward_on_rank_0() -> None:
    model = torch.nn.Sequential(*[torch.nn.Linear(2, 2) for _ in range(3)])
    wrapped = hvd.DistributedDataParallel(model, bucket_cap_mb=1e-5)
    wrapped(torch.ones(1, 2)).sum().backward()  # the first backward sends nothing before its end
    if hvd.rank() == 0:
        hook = model[1].register_full_backward_hook(fail)  # the last layer's gradients are sent by then
        with pytest.raises(MemoryError):
            wrapped(torch.ones(1, 2)).sum().backward()
        hook.remove()
        model.zero_grad()
    with pytest.raises(hvd.HorovodInternalError, match="not sent the same number of gradient buckets"):
        wrapped(torch.ones(1, 2)).sum().backward()
