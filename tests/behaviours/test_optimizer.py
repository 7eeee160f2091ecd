"""DistributedOptimizer as an object: what it keeps, what it refuses, and errors between ranks."""

from __future__ import annotations

import copy
import pickle
import types
import warnings
from abc import ABC
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

import dualdist as hvd
from dualdist.core.backends.base import Work
from dualdist.core.collectives.reduction import Compressor
from dualdist.core.world import current

from ..helpers.ranks import check_next_calls_work, mean
from ..helpers.styles import distributed, sgd, step
from ..helpers.world import everywhere


@everywhere
def test_it_is_the_optimizer_it_was_with_its_state() -> None:
    weight = nn.Parameter(torch.zeros(1))
    plain: torch.optim.Optimizer = torch.optim.SGD([weight], lr=1.0, momentum=0.5)
    weight.sum().mul(4.0).backward()
    plain.step()
    state, groups = plain.state, plain.param_groups
    optimizer = hvd.DistributedOptimizer(plain)
    assert optimizer is plain and isinstance(optimizer, torch.optim.SGD)
    assert type(optimizer).__name__ == "SGD"
    assert optimizer.state is state and optimizer.param_groups is groups
    step(optimizer, weight)
    assert weight.item() == pytest.approx(-4.0 - (2.0 + mean()))


class Doubling(Compressor):
    """Sends twice the gradient in float64."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return tensor.double() * 2, (tensor.dtype, 2)

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        dtype, factor = ctx
        assert tensor.dtype is torch.float64
        result: torch.Tensor = (tensor / factor).to(dtype)
        return result


COMPRESSORS = [Doubling, hvd.Compression.none, hvd.Compression.fp16, hvd.Compression.bf16]


@pytest.mark.parametrize("compression", [*COMPRESSORS, *(kind() for kind in COMPRESSORS)])
@everywhere
def test_gradients_are_decompressed(compression: type[Compressor] | Compressor) -> None:
    for op in (hvd.Average, hvd.Sum):
        weights = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(3))]
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(weights, lr=1.0), compression=compression, op=op)
        for number in (1, 2):
            step(optimizer, *weights)
            total = number * mean() * (hvd.size() if op == hvd.Sum else 1)
            for weight in weights:
                assert weight.grad is not None and weight.grad.dtype is torch.float32
                assert weight.tolist() == [-total] * weight.numel()  # exact: few bits


class Halving(Compressor):
    """Sends the left half of a matrix, and all of other gradients in units of their largest number; fails for none."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        if tensor.dim() == 2:
            return tensor.chunk(2, dim=1)[0].double(), None
        return tensor / tensor.max(), tensor.max()

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        if ctx is None:
            return torch.cat([tensor, torch.zeros_like(tensor)], dim=1).float()
        scaled: torch.Tensor = tensor * ctx
        return scaled


@everywhere
def test_a_rank_that_has_joined_adds_zeros_to_what_a_compressor_of_the_user_sends() -> None:
    """Which makes NaN of zeros."""
    weight = nn.Parameter(torch.zeros(3))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), compression=Halving)
    if hvd.rank() == 0:
        (weight * torch.tensor([1.0, 2.0, 4.0])).sum().backward()
        optimizer.step()
        torch.testing.assert_close(weight.detach(), -torch.tensor([1.0, 2.0, 4.0]) / hvd.size())
    hvd.join()


@everywhere
def test_a_compressor_of_the_user_gets_each_gradient_in_its_shape() -> None:
    """As in Horovod (horovod/torch/optimizer.py:189): what it does may depend on the shape and all numbers of one."""
    shapes: list[tuple[int, ...]] = [(2, 4), (3,), (4, 2), (0,), ()]
    given: list[dict[str, Any]] = [{}, {"groups": 2}, {"sparse_as_dense": True}]
    for options in given:
        weights = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
        weights[2].data = torch.zeros(2, 4).t()  # another layout
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(weights, lr=1.0), compression=Halving, **options)
        for _ in range(2):
            optimizer.zero_grad()
            torch.stack([((place + 1) * weight).sum() for place, weight in enumerate(weights)]).sum().backward()
            optimizer.step()
        halves = [[-2.0, -2.0, 0.0, 0.0]] * 2, [[-6.0, 0.0]] * 4
        assert [weight.tolist() for weight in weights] == [halves[0], [-4.0] * 3, halves[1], [], -10.0]


@everywhere
def test_groups_without_a_parameter_of_the_optimizer_are_left_out() -> None:
    given: list[list[list[torch.Tensor]]] = [[], [[]], [[nn.Parameter(torch.zeros(2))]]]
    for groups in given:
        weights = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(3))]
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(weights, lr=1.0), groups=groups)
        step(optimizer, *weights)
        assert [weight.tolist() for weight in weights] == [[-mean()] * 2, [-mean()] * 3]


class Remembering:
    """Counts, in an instance, how often it has compressed and decompressed."""

    def __init__(self) -> None:
        self.calls = [0, 0]

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
        self.calls[0] += 1
        return tensor * 2, self.calls[0]

    def decompress(self, tensor: torch.Tensor, ctx: int) -> torch.Tensor:
        self.calls[1] += 1
        return tensor / 2


@pytest.mark.parametrize("op", [hvd.Average, hvd.Adasum], ids=["average", "adasum"])
@everywhere
def test_the_instance_of_a_compressor_keeps_its_state(op: int) -> None:
    if op == hvd.Adasum and hvd.size() == 3:
        return  # a power of two
    compression: Any = Remembering()
    weight = nn.Parameter(torch.zeros(1))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), compression=compression, op=op)
    for _ in range(3):
        weight.grad = None
        weight.sum().backward()
        optimizer.step()
    assert weight.item() == -3.0
    assert compression.calls == [3, 3]
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum, compression=compression).item() == hvd.size()
    assert hvd.reducescatter(torch.ones(hvd.size()), compression=compression).tolist() == [1.0]
    assert compression.calls == [5, 5]


@everywhere
def test_a_compressor_and_its_instance_are_the_same_to_the_ranks() -> None:
    weight = nn.Parameter(torch.zeros(1))
    compression = hvd.Compression.fp16 if hvd.rank() == 0 else hvd.Compression.fp16()
    step(hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), compression=compression), weight)
    assert weight.item() == -mean()


@pytest.mark.parametrize("when", ["before", "after"])
@everywhere
def test_a_scheduler_made_before_or_after_wrapping_works_without_a_warning(when: str) -> None:
    weight = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    if when == "after":
        hvd.DistributedOptimizer(optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    if when == "before":
        hvd.DistributedOptimizer(optimizer)
    for _ in range(3):
        step(optimizer, weight)
        scheduler.step()
    assert weight.item() == pytest.approx(-mean() * 1.75)
    assert optimizer.param_groups[0]["lr"] == 0.125


@everywhere
def test_added_parameters_are_combined_and_have_the_defaults() -> None:
    first, second = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([first], lr=0.5, momentum=0.0))
    step(optimizer, first)
    optimizer.add_param_group({"params": [second]})
    assert optimizer.param_groups[1]["lr"] == 0.5
    for _ in range(2):
        step(optimizer, first, second)
    assert first.item() == pytest.approx(-1.5 * mean())
    assert second.tolist() == pytest.approx([-mean()] * 2)


@everywhere
def test_a_loaded_state_dict_continues_the_training() -> None:
    weight = nn.Parameter(torch.zeros(1))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0, momentum=0.5))
    step(optimizer, weight)
    saved, at = copy.deepcopy(optimizer.state_dict()), weight.item()
    step(optimizer, weight)
    after = weight.item()
    with torch.no_grad():
        weight.fill_(at)
    optimizer.load_state_dict(saved)
    step(optimizer, weight)
    assert weight.item() == pytest.approx(after) == pytest.approx(-2.5 * mean())


@pytest.mark.parametrize("copied", ["pickle", "deepcopy"])
@pytest.mark.parametrize("wraps", [False, True])
@everywhere
def test_a_copy_has_the_state_and_joins_the_world_at_its_first_gradients(copied: str, wraps: bool) -> None:
    weight = nn.Parameter(torch.zeros(1))
    optimizer = sgd([weight], momentum=0.5, backward_passes_per_step=2)
    for _ in range(2):
        weight.mul(hvd.rank() + 1.0).sum().backward()
    optimizer.step()
    if hvd.rank() == 0:
        copy.deepcopy(optimizer)  # a copy alone is no collective
    twin: Any = pickle.loads(pickle.dumps(optimizer)) if copied == "pickle" else copy.deepcopy(optimizer)
    assert isinstance(twin, torch.optim.SGD) and twin.param_groups[0]["lr"] == 1.0
    (own,) = twin.param_groups[0]["params"]
    assert own is not weight and own.item() == weight.item() == -2 * mean()
    assert twin.state[own]["momentum_buffer"].item() == pytest.approx(2 * mean())
    if wraps:
        with pytest.raises(ValueError, match="`backward_passes_per_step` must be"):
            hvd.DistributedOptimizer(twin, backward_passes_per_step=0)
        twin = hvd.DistributedOptimizer(twin, backward_passes_per_step=2)
        with pytest.raises(TypeError, match="Wrap it once"):
            hvd.DistributedOptimizer(twin)
    own.grad = None
    for passes in (1, 2):
        own.mul(hvd.rank() + 1.0).sum().backward()
        assert own.grad is not None
        assert own.grad.item() == (hvd.rank() + 1 if passes == 1 else 2 * mean())
    twin.step()
    assert own.item() == pytest.approx(-5 * mean())
    assert weight.item() == -2 * mean()


@everywhere
def test_a_copy_of_an_optimizer_of_some_ranks_or_with_a_hook_is_refused() -> None:
    weight = nn.Parameter(torch.zeros(1))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), comm_hook=allreduce_hook)
    with pytest.raises(RuntimeError, match="must not be copied or pickled"):
        copy.deepcopy(optimizer)


class Counting(torch.optim.SGD):
    """An optimizer whose step is its base's; torch runs the step hooks for both."""

    steps = 0

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        return super().step(closure)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum, hvd.Adasum], ids=["average", "sum", "adasum"])
@everywhere
def test_subclasses_and_hooks_of_the_user_still_run(op: int) -> None:
    weight = nn.Parameter(torch.zeros(1))
    seen: list[float] = []
    plain = Counting([weight], lr=1.0)
    optimizer = hvd.DistributedOptimizer(plain, op=op)
    plain.register_step_pre_hook(lambda *_: seen.append(weight.grad.item()))  # type: ignore[union-attr]
    step(optimizer, weight)
    # The gradients 1 and 2 are parallel, so Adasum averages them.
    assert weight.item() == (-3.0 if op == hvd.Sum else -1.5)
    assert plain.steps == 1
    assert set(seen) == {hvd.rank() + 1.0 if op == hvd.Adasum else -weight.item()}


class Abstract(ABC, torch.optim.Optimizer):
    """An optimizer with the memory layout of ABC."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group({"added": True, **param_group})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                param -= group["lr"] * param.grad


@everywhere
def test_the_class_of_an_optimizer_may_have_other_bases_before_torchs() -> None:
    weight, bias = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    plain = Abstract([weight], lr=1.0)
    optimizer: Any = hvd.DistributedOptimizer(plain)
    assert optimizer is plain and isinstance(optimizer, Abstract)
    optimizer.add_param_group({"params": [bias], "lr": 2.0})
    assert all(group["added"] for group in optimizer.param_groups)
    step(optimizer, weight, bias)
    assert [weight.item(), bias.item()] == pytest.approx([-mean(), -2 * mean()])
    assert type(copy.deepcopy(optimizer)).__name__ == "Abstract"
    assert type("Child", (type(optimizer),), {}).__mro__[1:] == type(optimizer).__mro__


class Renewed(torch.optim.SGD):
    """An optimizer that a script initializes again."""

    def renew(self) -> None:
        super().__init__(self.param_groups[0]["params"], lr=0.5)


INITIALIZED: dict[str, Callable[[Any], object]] = {
    "its-init": lambda one: one.__init__(one.param_groups[0]["params"], **one.defaults),
    "init-of-its-class": lambda one: torch.optim.SGD.__init__(one, one.param_groups[0]["params"], lr=0.5),
    "init-in-a-method": lambda one: one.renew(),
    "type": lambda one: type(one)(one.param_groups[0]["params"], **one.defaults),
    "subclass": lambda one: types.new_class("Mine", (type(one),))(one.param_groups[0]["params"], lr=0.5),
    "new-and-init": lambda one: torch.optim.SGD.__init__(
        one.__class__.__new__(one.__class__), one.param_groups[0]["params"], lr=0.5
    ),
}


@pytest.mark.parametrize("way", INITIALIZED)
@everywhere
def test_an_optimizer_that_is_initialized_as_a_distributed_one_is_an_error(way: str) -> None:
    weight, by_hand = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    optimizer = hvd.DistributedOptimizer(Renewed([weight, by_hand], lr=1.0))
    with pytest.raises(TypeError, match=r"Make another one by DistributedOptimizer\((Renewed|Mine)\("):
        INITIALIZED[way](optimizer)
    if way in ("its-init", "type", "subclass", "new-and-init"):  # it is as it was
        weight.sum().backward()
        by_hand.grad = torch.full((1,), hvd.rank() + 1.0)
        optimizer.step()
        assert (weight.item(), by_hand.item()) == (-1, -(hvd.size() + 1) / 2)


@everywhere
def test_a_gradient_that_the_script_sets_is_combined_although_it_has_removed_hooks_of_step() -> None:
    weight, by_hand = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    optimizer: Any = hvd.DistributedOptimizer(torch.optim.SGD([weight, by_hand], lr=1.0))
    for number in range(1, 4):
        optimizer._optimizer_step_pre_hooks.clear()
        optimizer._optimizer_step_post_hooks = OrderedDict()
        optimizer.zero_grad()
        weight.sum().backward()
        by_hand.grad = torch.full((1,), hvd.rank() + 1.0)
        optimizer.step()
        assert (weight.item(), by_hand.item()) == (-number, -number * (hvd.size() + 1) / 2)


@everywhere
def test_a_class_that_counts_its_subclasses_gets_one() -> None:
    made: list[type] = []

    class Counted(torch.optim.SGD):
        def __init_subclass__(cls) -> None:
            made.append(cls)

    plain: Any = Counted([nn.Parameter(torch.zeros(1))], lr=1.0)
    assert made == [type(hvd.DistributedOptimizer(plain))]


@everywhere
def test_what_cannot_be_wrapped_is_refused() -> None:
    weight, bias = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))

    def plain() -> torch.optim.Optimizer:
        return torch.optim.SGD([weight, bias], lr=1.0)

    good = [("weight", weight), ("bias", bias)]
    refused: list[dict[str, Any]] = [
        {"named_parameters": [weight, bias]},
        {"named_parameters": [("same", weight), ("same", bias)]},
        {"named_parameters": [("weight", weight)]},
        {"op": hvd.Sum, "gradient_predivide_factor": 2.0},
        {"groups": [[weight], [weight, bias]]},
    ]
    for options in refused:
        with pytest.raises(ValueError, match="must"):
            hvd.DistributedOptimizer(plain(), **({"named_parameters": good} | options))
    optimizer = hvd.DistributedOptimizer(plain(), [*good, ("more", nn.Parameter(torch.zeros(1)))])
    with pytest.raises(TypeError, match="distributed already"):
        hvd.DistributedOptimizer(optimizer)
    model: Any = nn.Linear(1, 1)
    with pytest.raises(TypeError, match=r"Pass torch\.optim\.SGD\(model\.parameters\(\), lr=0\.1\), for example"):
        hvd.DistributedOptimizer(model)
    hvd.barrier()


DIFFERENT = {"op": hvd.Sum, "compression": hvd.Compression.fp16, "groups": 1}
"""Options of the last rank alone. test_wrong_use.py has parameters that differ."""


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("option", DIFFERENT)
@everywhere
def test_an_option_that_differs_between_ranks_is_an_error_at_construction(option: str) -> None:
    options: dict[str, Any] = {option: DIFFERENT[option]} if hvd.rank() == hvd.size() - 1 else {}
    with pytest.raises(hvd.CollectiveMismatchError, match="DistributedOptimizer") as caught:
        hvd.DistributedOptimizer(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0), **options)
    assert __file__ in str(caught.value)
    check_next_calls_work()


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("numel", [1, 400_000])
@everywhere
def test_a_backward_here_and_an_allreduce_there_is_an_error_on_both(numel: int) -> None:
    params = [nn.Parameter(torch.zeros(numel)) for _ in range(3)]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(params, lr=1.0))
    with pytest.raises(hvd.CollectiveMismatchError, match="gradient synchronization") as caught:
        if hvd.rank() == 0:
            hvd.allreduce(torch.ones(2))
        else:
            torch.stack([param.sum() for param in params]).sum().backward()
    assert "allreduce(" in str(caught.value) and __file__ in str(caught.value)
    step(optimizer, *params)
    for param in params:
        assert torch.equal(param.detach(), torch.full((numel,), -mean()))
    check_next_calls_work()


@pytest.mark.ranks(2, 3)
@everywhere
def test_collectives_between_backward_and_step_do_not_mix_with_gradients() -> None:
    weight = nn.Parameter(torch.zeros(1))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0))
    handle = hvd.allreduce_async(torch.ones(3), op=hvd.Sum)
    loss = weight.sum() * (hvd.rank() + 1)
    loss.backward()
    assert hvd.allgather_object(weight.grad.item()) == [mean()] * hvd.size()  # type: ignore[union-attr]
    assert hvd.synchronize(handle).tolist() == [hvd.size()] * 3
    optimizer.step()
    assert weight.item() == -mean()


@everywhere
def test_parameters_that_no_rank_used_have_zeros_in_the_step_and_not_before() -> None:
    used, unused, frozen = (nn.Parameter(torch.ones(2), requires_grad=number < 2) for number in range(3))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([used, unused, frozen], lr=1.0, weight_decay=0.5))
    assert used.grad is None and unused.grad is None
    used.sum().backward()
    assert unused.grad is None
    optimizer.step()
    assert unused.grad is not None and unused.grad.tolist() == [0.0, 0.0]
    assert (used.tolist(), unused.tolist(), frozen.grad) == ([-0.5, -0.5], [0.5, 0.5], None)


@pytest.mark.parametrize("passes", [1, 2])
@everywhere
def test_parameters_that_no_rank_used_have_zeros_after_synchronize(passes: int) -> None:
    """So Horovod's recipe for clipping takes the same step as one without: weight decay changes them."""
    used, unused, frozen = (nn.Parameter(torch.ones(2), requires_grad=number < 2) for number in range(3))
    plain = torch.optim.SGD([used, unused, frozen], lr=1.0, weight_decay=0.5)
    optimizer = hvd.DistributedOptimizer(plain, backward_passes_per_step=passes)
    used.sum().backward()
    optimizer.synchronize()
    assert unused.grad is not None and unused.grad.tolist() == [0.0, 0.0]
    with optimizer.skip_synchronize():
        optimizer.step()
    assert (used.tolist(), unused.tolist(), frozen.grad) == ([-0.5, -0.5], [0.5, 0.5], None)
    optimizer.zero_grad()
    (used.sum() + unused.sum() * (hvd.rank() + 1)).backward()
    optimizer.synchronize()
    assert unused.grad.tolist() == [mean()] * 2


@everywhere
def test_a_parameter_that_is_frozen_later_stays_what_it_is() -> None:
    trained, frozen = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([trained, frozen], lr=1.0, momentum=0.5, weight_decay=0.5))
    for freezes in (False, True):
        frozen.requires_grad_(not freezes)
        optimizer.zero_grad()
        (trained + frozen).sum().backward()
        optimizer.synchronize()
        with optimizer.skip_synchronize():
            optimizer.step()
        assert frozen.tolist() == [-0.5, -0.5]
    assert trained.tolist() == [-2.0, -2.0]  # the second step is 0.5 * 1.5 + 1 - 0.25


@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum])
@everywhere
def test_parameters_without_a_gradient_have_zeros_after_a_broadcast_of_a_new_state(op: int) -> None:
    """As in Horovod: scripts read gradients before the first backward (horovod/torch/functions.py:95)."""
    model: Any = nn.ParameterDict({"trained": torch.zeros(2), "by_hand": torch.zeros(2)})
    model.complex, model.table = nn.Parameter(torch.zeros(2) + 0j), nn.Embedding(3, 1, sparse=True)
    model.frozen = nn.Parameter(torch.zeros(2), requires_grad=False)
    nn.init.zeros_(model.table.weight)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), op=op)
    model.by_hand.grad = own = torch.full((2,), 1.0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert model.trained.grad.tolist() == [0.0, 0.0] and model.complex.grad.tolist() == [0j, 0j]
    assert model.by_hand.grad is own and own.tolist() == [1.0, 1.0] and model.frozen.grad is None
    assert model.table.weight.grad.tolist() == [[0.0]] * 3  # torch 2.15 loses what it would add to them
    factor = (hvd.size() + 1) / 2 * (hvd.size() if op == hvd.Sum else 1)
    for number in (1, 2):  # the first time without zero_grad()
        parts = model.trained.sum(), model.complex.real.sum(), model.table(torch.tensor([1])).sum()
        (sum(parts) * (hvd.rank() + 1)).backward()
        optimizer.step()
        assert model.trained.tolist() == [-number * factor] * 2
        assert model.complex.tolist() == [-number * factor + 0j] * 2
        assert model.table.weight.flatten().tolist() == [0.0, -number * factor, 0.0]
        optimizer.zero_grad()
        assert model.trained.grad is None and model.by_hand.tolist() == [-factor / (hvd.size() + 1) * 2] * 2


@everywhere
def test_an_optimizer_that_takes_no_dense_gradients_gets_no_zeros() -> None:
    table = nn.Embedding(3, 1, sparse=True)
    optimizer = hvd.DistributedOptimizer(torch.optim.SparseAdam(list(table.parameters()), lr=0.1))
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert table.weight.grad is None


@everywhere
def test_a_combined_gradient_that_the_script_takes_away_stays_away() -> None:
    trained, frozen = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([trained, frozen], lr=1.0, momentum=0.9, weight_decay=0.5))
    for number in range(3):
        optimizer.zero_grad()
        (trained + frozen).sum().backward()
        frozen.grad = None  # as DINO freezes its last layer
        optimizer.step()
        assert frozen.tolist() == [1.0, 1.0] and frozen.grad is None
        assert trained.tolist() != [1.0, 1.0], number


@pytest.mark.parametrize("passing", ["all-ranks", "rank-0"])
@pytest.mark.parametrize("zeroed", ["to-none", "to-zeros", "never"])
@pytest.mark.parametrize("kind", ["average", "sum", "hook"])
@everywhere
def test_a_gradient_that_the_script_sets_beside_backward_is_combined_once_in_each_step(
    kind: str, zeroed: str, passing: str
) -> None:
    """As in Horovod: what a rank does not set again counts as well. In the second step, only the last rank sets it."""
    trained, by_hand = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    options: Any = {"average": {}, "sum": {"op": hvd.Sum}, "hook": {"comm_hook": (None, allreduce_hook)}}
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([trained, by_hand], lr=1.0), **options[kind])
    rank, size = hvd.rank(), hvd.size()
    factor = 1.0 if kind == "sum" else 1 / size
    held, wanted = [0.0] * size, 0.0
    for number in range(1, 5):
        if zeroed == "never":
            trained.grad = None
        else:
            optimizer.zero_grad(set_to_none=zeroed == "to-none")
            held = [0.0] * size
        if passing == "all-ranks" or rank == 0:
            trained.sum().backward()
        for place in [size - 1] if number == 2 else range(size):
            held[place] = 10.0 * number + place
        if number != 2 or rank == size - 1:
            if by_hand.grad is None:
                by_hand.grad = torch.zeros(2)
            by_hand.grad.copy_(torch.full((2,), held[rank]))
        optimizer.step()
        held = [sum(held) * factor] * size
        wanted -= held[0]
        assert by_hand.tolist() == pytest.approx([wanted] * 2)
        assert trained.tolist() == pytest.approx([-number * factor * (size if passing == "all-ranks" else 1)] * 2)


@everywhere
def test_a_gradient_that_backward_leaves_out_is_summed_once_by_synchronize_or_by_the_step() -> None:
    trained, by_hand = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([trained, by_hand], lr=1.0), op=hvd.Sum)
    total = hvd.size() * (hvd.size() + 1) / 2
    for number in (1, 2, 3, 4):
        if number > 1:
            optimizer.zero_grad(set_to_none=False)
        by_hand.grad = torch.full((1,), hvd.rank() + 1.0)
        trained.sum().backward()
        assert by_hand.grad.item() == hvd.rank() + 1
        if number % 2 == 0:
            optimizer.synchronize()
            assert by_hand.grad.item() == total
        optimizer.step()
        assert (trained.item(), by_hand.item()) == (-number * hvd.size(), -number * total)


@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum])
@everywhere
def test_a_gradient_of_zeros_that_backward_leaves_out_may_be_set_on_some_ranks(op: int) -> None:
    """The last rank sets it, also by `.data`, which counts no version up. The others' zeros count, as in Horovod."""
    trained, by_hand = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([trained, by_hand], lr=1.0), op=op)
    factor = 1 / hvd.size() if op == hvd.Average else 1.0
    for number in range(1, 4):
        optimizer.zero_grad(set_to_none=False)
        (trained * number * (hvd.rank() + 1)).sum().backward()
        if hvd.rank() == hvd.size() - 1:
            if by_hand.grad is None:
                by_hand.grad = torch.ones(2)
            else:
                by_hand.grad.data.add_(1.0)
        optimizer.step()
        total = number * (number + 1) / 2 * hvd.size() * (hvd.size() + 1) / 2
        assert trained.tolist() == pytest.approx([1 - factor * total] * 2)
        assert by_hand.tolist() == pytest.approx([1 - factor * number] * 2, abs=1e-6)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("passes", [1, 2])
@everywhere
def test_ranks_may_combine_in_backward_or_in_the_step_while_a_parameter_is_left_out(passes: int) -> None:
    used, unused = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    optimizer = sgd([used, unused], backward_passes_per_step=passes)
    for number in range(1, 4):
        optimizer.zero_grad()
        # In the second step, the last rank makes one pass less, or none.
        for _ in range(passes - (number == 2 and hvd.rank() == hvd.size() - 1)):
            used.sum().backward()
        optimizer.step()
    assert used.item() == pytest.approx(-3 * passes + 1 / hvd.size()) and unused.item() == 0


@pytest.mark.ranks(2, 3)
@everywhere
def test_an_old_gradient_is_averaged_once_when_a_rank_has_joined() -> None:
    first, later = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([first, later], lr=1.0))
    for number in range(4 if hvd.rank() == 0 else 2):
        param = later if number else first
        param.grad = None  # that of the other one stays
        (param * 4).sum().backward()
        optimizer.step()
    if hvd.rank() == 0:
        share = 1 / hvd.size()  # this rank reduces its old gradient with the zeros of those that have joined
        assert later.item() == pytest.approx(-4 * (1 + 2 * share))
        assert first.item() == pytest.approx(-4 * (2 + share + share**2))
    hvd.join()


@everywhere
def test_a_parameter_that_is_added_before_the_step_is_combined_in_it() -> None:
    first, added = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([first], lr=1.0))
    ((first + added) * (hvd.rank() + 1)).sum().backward()
    optimizer.add_param_group({"params": [added]})
    optimizer.step()
    assert (first.item(), added.item()) == (-mean(), -mean())


@everywhere
def test_a_parameter_that_is_thawed_after_backward_is_combined_in_the_step() -> None:
    trained, thawed = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([trained, thawed], lr=1.0))
    for number in range(1, 4):
        optimizer.zero_grad()
        thawed.requires_grad_(False)
        trained.sum().backward()
        thawed.requires_grad_(True)
        thawed.grad = torch.full((1,), hvd.rank() + 1.0)
        optimizer.step()
        assert (trained.item(), thawed.item()) == (-number, -number * (hvd.size() + 1) / 2)


@pytest.mark.ranks(2, 3)
@everywhere
def test_a_sum_has_a_gradient_that_one_rank_set_before_another_reached_the_parameter() -> None:
    trained, late, other = (nn.Parameter(torch.zeros(1)) for _ in range(3))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([trained, late, other], lr=1.0), op=hvd.Sum)
    late.grad = torch.zeros(1)
    for number in range(1, 4):
        optimizer.zero_grad(set_to_none=False)
        trained.sum().backward()
        if hvd.rank() == 0:
            late.grad = torch.full((1,), 2.0)
        (late * 4 if hvd.rank() == 1 else other * 0).sum().backward()
        optimizer.step()
        assert late.item() == -6 * number


@everywhere
def test_sparse_adam_trains_without_zero_grad_and_with_a_table_that_no_rank_uses() -> None:
    used, unused = (nn.Embedding(4, 2, sparse=True) for _ in range(2))
    params = [*used.parameters(), *unused.parameters()]
    optimizer = hvd.DistributedOptimizer(torch.optim.SparseAdam(params, lr=0.1))
    before = [param.detach().clone() for param in params]
    for _ in range(2):
        used(torch.tensor([1])).sum().backward()
        optimizer.step()
    assert torch.equal(unused.weight, before[1])
    assert torch.equal(used.weight[0], before[0][0]) and not torch.equal(used.weight[1], before[0][1])


@everywhere
def test_a_parameter_that_is_put_into_a_group_is_an_error_at_the_step() -> None:
    weight, new, added = (nn.Parameter(torch.ones(2)) for _ in range(3))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0))
    optimizer.add_param_group({"params": [added]})
    step(optimizer, weight, added)
    optimizer.param_groups[0]["params"].append(new)
    optimizer.zero_grad()
    (weight + new).sum().backward()
    with pytest.raises(ValueError, match=r"shape \(2,\) was put into param_groups without add_param_group"):
        optimizer.step()
    del optimizer.param_groups[0]["params"][-1]
    step(optimizer, weight, added)
    assert weight.tolist() == [pytest.approx(1 - 2 * mean())] * 2


@pytest.mark.only_ci(where=lambda world, options: "horovod" in world and options.get("op") != hvd.Sum)
@pytest.mark.parametrize(
    "options", [{"op": hvd.Sum}, {"comm_hook": allreduce_hook}, {"compression": Doubling}, {"op": hvd.Adasum}]
)
@everywhere
def test_two_optimizers_that_would_combine_a_gradient_twice_are_refused(options: dict[str, Any]) -> None:
    if options == {"op": hvd.Adasum} and hvd.size() == 3:
        return  # a power of two
    shared, own = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    names = [("own", own), ("shared", shared)]
    first = hvd.DistributedOptimizer(torch.optim.SGD([own, shared], lr=1.0), names)
    with pytest.raises(ValueError, match="gradient would be combined twice"):
        hvd.DistributedOptimizer(torch.optim.SGD([shared], lr=1.0), **options)
    second = hvd.DistributedOptimizer(torch.optim.SGD([shared], lr=1.0))  # averages of averages
    step(first, own, shared)
    second.step()
    assert own.item() == pytest.approx(1 - mean()) and shared.item() == pytest.approx(1 - 2 * mean())
    del first, second
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([shared], lr=1.0), **options)
    assert isinstance(optimizer, torch.optim.SGD)


@everywhere
def test_gradients_that_would_be_part_of_a_graph_are_refused() -> None:
    weight = nn.Parameter(torch.ones(2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0))
    for _ in range(2):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with pytest.raises(RuntimeError, match=r"`create_graph` must be False.*torch\.autograd\.grad"):
                weight.pow(3).sum().backward(create_graph=True)
        optimizer.zero_grad()
    (grad,) = torch.autograd.grad(weight.pow(3).sum(), weight, create_graph=True)
    (grad.square().sum() * (hvd.rank() + 1)).backward()
    assert weight.grad is not None and weight.grad.tolist() == [pytest.approx(36 * mean())] * 2


@everywhere
def test_an_optimizer_for_each_parameter_may_step_in_hooks() -> None:
    """As torch's tutorial on saving memory by fusing the optimizer step into backward."""
    model, reference = (nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)) for _ in range(2))
    hvd.broadcast_parameters(model.state_dict(), 0)
    reference.load_state_dict(model.state_dict())
    alone = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    optimizers = {
        param: hvd.DistributedOptimizer(torch.optim.SGD([param], lr=0.1, momentum=0.9)) for param in model.parameters()
    }

    def finish(param: torch.Tensor) -> None:
        optimizers[param].step()  # type: ignore[index]
        optimizers[param].zero_grad()  # type: ignore[index]

    hooks = [param.register_post_accumulate_grad_hook(finish) for param in model.parameters()]
    for number in range(4):
        inputs = torch.randn(hvd.size(), 2, 3, generator=torch.Generator().manual_seed(number))
        model(inputs[hvd.rank()]).square().mean().backward()
        alone.zero_grad()
        reference(inputs).square().mean().backward()
        alone.step()
        for own, expected in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(own, expected)
    for hook in hooks:  # torch would keep the optimizers, to which they refer, for ever
        hook.remove()


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("style", ["optimizer", "module"])
@everywhere
def test_a_step_in_a_hook_that_would_use_gradients_of_this_rank_is_an_error(style: str) -> None:
    params = nn.ParameterList(nn.Parameter(torch.ones(1)) for _ in range(2))
    wrapped, optimizer = distributed(style, params, torch.optim.SGD(params, lr=1.0))

    def finish(_: torch.Tensor) -> None:
        optimizer.step()
        optimizer.zero_grad()

    hooks = [param.register_post_accumulate_grad_hook(finish) for param in params]
    errors = {"module": "hooks have removed all of them", "optimizer": r"step\(\) must not be called in a hook"}
    with pytest.raises(RuntimeError, match=errors[style]):
        (params[0] + params[1]).sum().backward()
    for hook in hooks:
        hook.remove()
    assert wrapped is not None


@everywhere
def test_no_sync_accumulates_locally_as_in_the_module() -> None:
    weight = nn.Parameter(torch.ones(1))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0))
    for _ in range(3):
        optimizer.zero_grad()
        with optimizer.no_sync():
            weight.mul(hvd.rank() + 1.0).sum().backward()
        assert weight.grad is not None and weight.grad.item() == hvd.rank() + 1
        weight.mul(hvd.rank() + 1.0).sum().backward()
        assert weight.grad.item() == pytest.approx(2 * mean())


@everywhere
def test_frozen_parameters_of_any_dtype_are_left_alone() -> None:
    quantized = (torch.int8, torch.uint8, torch.bool, torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn)
    bases = [nn.Parameter(torch.ones(3).to(dtype), requires_grad=False) for dtype in quantized]
    adapter = nn.Parameter(torch.ones(3))
    params = [*bases, adapter]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(params, lr=1.0), groups=[params])
    for _ in range(3):
        step(optimizer, adapter)
    assert all(base.grad is None for base in bases)
    assert adapter.tolist() == [pytest.approx(1 - 3 * mean())] * 3


@everywhere
def test_gradients_may_have_another_dtype_than_their_parameter() -> None:
    weight = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    if not hasattr(weight, "grad_dtype"):
        return  # an older torch
    weight.grad_dtype = torch.float32
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0))
    for _ in range(3):
        optimizer.zero_grad()
        weight.mul(hvd.rank() + 1.0).sum().backward()
        assert weight.grad is not None and weight.grad.dtype is torch.float32
        assert weight.grad.tolist() == [pytest.approx(mean())] * 3


@pytest.mark.parametrize("style", ["optimizer", "module"])
@everywhere
def test_a_conversion_that_would_lose_the_hooks_is_refused(style: str) -> None:
    model = nn.Linear(2, 2)
    wrapped = distributed(style, model, torch.optim.SGD(model.parameters(), lr=1.0))
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        with pytest.raises(RuntimeError, match=r"Couldn't swap Linear\.weight"):
            model.double()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert wrapped is not None


@pytest.mark.parametrize("has_sparse", [False, True])
@pytest.mark.ranks(2)
@pytest.mark.world_kinds("torch-gloo")
@everywhere
def test_another_call_in_place_of_a_backward_raises_although_nccl_connects_late(has_sparse: bool) -> None:
    """The double of NCCL: the first allreduce of a size returns when all ranks have made it.

    The buckets have other sizes after a backward in which a gradient turns out to be sparse.
    """
    context, connected = current(), set()
    gradients = context.channels[0].gradients
    allreduce = gradients.allreduce_

    def connecting(tensor: torch.Tensor, op: int, tag: str = "") -> Work:
        work = allreduce(tensor, op, tag)
        if tensor.nbytes not in connected:
            connected.add(tensor.nbytes)
            work.wait()
        return work

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gradients, "allreduce_", connecting)
        patch.setattr(context.backend, "runs_ahead", True)
        patch.setattr(context.channels[0]._connections, "_timeout", 5.0)
        model = nn.Sequential(nn.Embedding(2, 4, sparse=has_sparse), nn.Linear(4, 3))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        if has_sparse:
            model(torch.ones(1, dtype=torch.long)).sum().backward()
            optimizer.step()
        with pytest.raises(hvd.CollectiveMismatchError):
            if hvd.rank() == 0:
                model(torch.ones(1, dtype=torch.long)).sum().backward()
                optimizer.step()
            else:
                hvd.allreduce(torch.ones(1), name="loss")
