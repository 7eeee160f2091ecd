"""Gradients that arrive in the order of the last backward are handled together. Other orders give the same result."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import dualdist as hvd
from dualdist.core.collectives.reduction import Compressor

from ..helpers.ranks import check_next_calls_work
from ..helpers.rejoining import rejoin
from ..helpers.styles import sgd
from ..helpers.world import everywhere

Parts = Sequence[torch.Tensor]
WEIGHTS = 4
BACKWARDS_IN_TURN = 10
"""After so many in another order, buckets follow it."""
LARGE = 1 << 18
"""So many float32 numbers, 1 MB, move to their bucket before it is complete."""


class Wrapped:
    """Four weights, two of them in each bucket, after three backwards in the same order."""

    def __init__(self, style: str, *, is_oldest: bool = False) -> None:
        """is_oldest: whether no wrapper of another test may be older, which would delay buckets."""
        if is_oldest:
            rejoin()
        self.length = LARGE if "large" in style else 2
        self.model = nn.ParameterList([nn.Parameter(torch.ones(self.length)) for _ in range(WEIGHTS)])
        self.weights = list(self.model)
        self.ordered = self.weights[::-1]
        """In this order the first bucket is complete halfway through backward."""
        optimizer = torch.optim.SGD(self.weights, lr=1.0)
        if style.startswith("module"):
            cap = 2 * self.length * 4 / 2**20
            self.wrapper: Any = hvd.DistributedDataParallel(self.model, bucket_cap_mb_list=[cap])
        else:
            groups = [self.weights[:2], self.weights[2:]]
            self.wrapper = hvd.DistributedOptimizer(optimizer, groups=groups)
        for _ in range(3):
            self.zero_grad()
            self.check([1, 1, 1, 1], chained(self.ordered).backward)

    def zero_grad(self) -> None:
        for weight in self.weights:
            weight.grad = None

    def check(self, expected: Sequence[int | None], run: Callable[[], None]) -> None:
        """Expect gradients of these multiples of the mean of the ranks' factors."""
        run()
        mean = (hvd.size() + 1) / 2
        found = [None if weight.grad is None else weight.grad.unique().tolist() for weight in self.weights]
        assert found == [None if times is None else [times * mean] for times in expected]

    def turn_buckets(self, *, without_last: bool = False) -> None:
        """Run backwards in another order until buckets follow it. without_last: the next one is the last of them."""
        before = self.layout
        for _ in range(BACKWARDS_IN_TURN - without_last):
            self.zero_grad()
            chained(self.weights).backward()
        assert (self.layout == before) is without_last

    @property
    def layout(self) -> list[int]:
        """The parameters in the order in which they are sent."""
        combiner = self.wrapper._combiner
        return [slot.param for bucket in combiner._reducer.layout.buckets for slot in bucket.slots]

    def fail_after(self, weights: Parts) -> None:
        """Run a backward that raises when it has completed the gradients of `weights`, in this order."""

        def fail(_: torch.Tensor) -> None:
            raise ArithmeticError("on purpose")

        last = torch.ones(self.length, requires_grad=True).clone()
        last.register_hook(fail)
        with pytest.raises(ArithmeticError):
            chained([*weights, last]).backward()

    def fail_where_ranks_expect_different_orders(self) -> None:
        """Run a backward that raises after the first bucket. Rank 0 has not looked at its gradients by then."""
        late = [self.weights[index] for index in (3, 1, 0, 2)]  # the first bucket is complete at the end
        self.zero_grad()
        self.check([1, 1, 1, 1], chained(late if hvd.rank() == 0 else self.ordered).backward)
        self.zero_grad()
        self.fail_after(self.ordered[:3])


def chained(weights: Parts) -> torch.Tensor:
    """Return a loss whose gradients arrive in the order of the weights, each of them this rank's factor."""
    total = torch.zeros_like(weights[0])
    for weight in reversed(weights):
        total = total.clone() + weight
    return total.sum() * (hvd.rank() + 1)


styles = pytest.mark.parametrize("style", ["optimizer", "module", "optimizer, large", "module, large"])


@styles
@everywhere
def test_another_order_gives_the_same_gradients(style: str) -> None:
    wrapped = Wrapped(style)
    for order in ([0, 1, 2, 3], [1, 3, 0, 2], [3, 2, 1, 0], [0, 2, 1, 3], [0, 2, 1, 3], [3, 2, 0, 1]):
        wrapped.zero_grad()
        wrapped.check([1, 1, 1, 1], chained([wrapped.weights[index] for index in order]).backward)


@styles
@everywhere
def test_a_backward_of_some_parameters_is_combined_when_it_ends(style: str) -> None:
    wrapped = Wrapped(style)
    for used in ([0], [3], [0, 1], [2, 3], [0, 1, 2], [1, 2, 3]):
        wrapped.zero_grad()
        expected = [1 if index in used else None for index in range(WEIGHTS)]
        wrapped.check(expected, chained([wrapped.weights[index] for index in used]).backward)


@styles
@everywhere
def test_gradients_that_are_kept_accumulate(style: str) -> None:
    wrapped = Wrapped(style)
    wrapped.check([2, 2, 2, 2], chained(wrapped.ordered).backward)
    wrapped.check([2, 3, 2, 2], chained(wrapped.weights[1:2]).backward)
    wrapped.check([3, 4, 3, 3], chained(wrapped.ordered).backward)


@styles
@everywhere
def test_a_hook_may_keep_and_replace_an_earlier_gradient(style: str) -> None:
    wrapped, kept = Wrapped(style), []
    first, second = wrapped.ordered[:2]  # they share a bucket

    def replace(_: torch.Tensor) -> None:
        kept.append(first.grad)
        first.grad = 10 * first.grad

    second.register_post_accumulate_grad_hook(replace)
    wrapped.zero_grad()
    wrapped.check([1, 1, 1, 10], chained(wrapped.ordered).backward)
    assert kept[0] is not None and kept[0].unique().tolist() == [hvd.rank() + 1]


@pytest.mark.not_on_devices
@styles
@everywhere
def test_a_gradient_that_a_hook_replaces_after_it_was_sent_is_the_combined_one(style: str) -> None:
    wrapped = Wrapped(style, is_oldest=True)

    def replace(_: torch.Tensor) -> None:
        wrapped.ordered[0].grad = torch.full((wrapped.length,), 7.0)

    wrapped.ordered[2].register_post_accumulate_grad_hook(replace)
    wrapped.zero_grad()
    wrapped.check([1, 1, 1, 1], chained(wrapped.ordered).backward)


@pytest.mark.only_ci(where=lambda world, after: "horovod" in world and after > 1)
@styles
@pytest.mark.parametrize("after", range(1, WEIGHTS + 1))
@everywhere
def test_a_backward_that_failed_is_repeated(style: str, after: int) -> None:
    wrapped = Wrapped(style)
    for _ in range(2):
        wrapped.zero_grad()
        wrapped.fail_after(wrapped.ordered[:after])
        wrapped.zero_grad()
        wrapped.check([1, 1, 1, 1], chained(wrapped.ordered).backward)


@styles
@everywhere
def test_a_backward_that_failed_is_repeated_also_where_ranks_expect_different_orders(style: str) -> None:
    wrapped = Wrapped(style)
    wrapped.fail_where_ranks_expect_different_orders()
    for _ in range(2):
        wrapped.zero_grad()
        wrapped.check([1, 1, 1, 1], chained(wrapped.ordered).backward)


@pytest.mark.parametrize("style", ["optimizer", "module"])
@pytest.mark.ranks(2, 3)
@everywhere
def test_a_repeat_with_kept_gradients_is_an_error_also_where_ranks_expect_different_orders(style: str) -> None:
    wrapped = Wrapped(style, is_oldest=True)
    wrapped.fail_where_ranks_expect_different_orders()
    if hvd.rank() != 0:  # these have sent gradients, and repeat once more
        with pytest.raises(RuntimeError, match="was sent before its backward was complete"):
            chained(wrapped.ordered).backward()
        wrapped.zero_grad()
    with pytest.raises(hvd.HorovodInternalError, match="not sent the same number of gradient buckets"):
        chained(wrapped.ordered).backward()
    rejoin()
    check_next_calls_work()


@pytest.mark.parametrize("style", ["optimizer", "optimizer, large"])
@everywhere
def test_a_step_after_a_backward_that_failed_combines_what_it_completed(style: str) -> None:
    wrapped = Wrapped(style)
    wrapped.zero_grad()
    wrapped.fail_after(wrapped.ordered[:3])
    wrapped.check([None, 1, 1, 1], wrapped.wrapper.synchronize)


@pytest.mark.parametrize("style", ["module", "module, large"])
@everywhere
def test_local_backwards_in_between_are_combined_with_the_next_one(style: str) -> None:
    wrapped = Wrapped(style)
    wrapped.zero_grad()
    with wrapped.wrapper.no_sync():
        chained(wrapped.ordered).backward()
        chained(wrapped.weights[2:]).backward()
    wrapped.check([2, 2, 3, 3], chained(wrapped.ordered).backward)


@styles
@everywhere
def test_a_backward_inside_another_one_is_combined(style: str) -> None:
    wrapped = Wrapped(style)

    def inner(hidden: torch.Tensor) -> torch.Tensor:
        for weight in wrapped.weights[1:3]:
            hidden = hidden.clone() + weight
        return hidden

    def run() -> None:
        start = torch.zeros(wrapped.length, requires_grad=True)
        hidden = start.clone() + wrapped.weights[0]
        total = checkpoint(inner, hidden, use_reentrant=True) + wrapped.weights[3]
        (total.sum() * (hvd.rank() + 1)).backward()

    for _ in range(3):
        wrapped.zero_grad()
        wrapped.check([1, 1, 1, 1], run)


@styles
@everywhere
def test_buckets_that_follow_a_new_order_give_the_same_gradients(style: str) -> None:
    wrapped = Wrapped(style, is_oldest=True)
    wrapped.turn_buckets()
    for order in ([0, 1, 2, 3], [1, 0, 3, 2], [3, 2, 1, 0], [0, 2, 1]):
        wrapped.zero_grad()
        expected = [1, 1, 1, 1 if 3 in order else None]
        wrapped.check(expected, chained([wrapped.weights[index] for index in order]).backward)
    wrapped.check([2, 2, 2, 1], chained(wrapped.weights).backward)


@styles
@everywhere
def test_gradients_that_are_kept_accumulate_while_buckets_change(style: str) -> None:
    wrapped = Wrapped(style, is_oldest=True)
    wrapped.turn_buckets(without_last=True)
    wrapped.zero_grad()
    for times in range(1, 4):  # buckets change after the first one
        wrapped.check([times] * WEIGHTS, chained(wrapped.weights).backward)


@pytest.mark.parametrize("is_released", [False, True])
@pytest.mark.ranks(2, 3)
@everywhere
def test_a_rank_that_has_joined_sends_zeros_in_buckets_of_a_new_order(is_released: bool) -> None:
    wrapped = Wrapped("module", is_oldest=True)
    size = hvd.size()
    wrapped.turn_buckets()
    wrapped.zero_grad()
    if hvd.rank() == size - 1:
        if is_released:
            del wrapped.wrapper
            gc.collect()
    else:
        for order in [0, 1, 2, 3], [3, 1, 0, 2]:
            wrapped.zero_grad()
            chained([wrapped.weights[index] for index in order]).backward()
            mean = sum(range(1, size)) / size
            assert [weight.grad.tolist() for weight in wrapped.weights] == [[mean] * 2] * WEIGHTS
    hvd.join()


class Recorder(Compressor):
    """Records when a bucket is sent."""

    events: list[str]

    @classmethod
    def compress(cls, tensor: torch.Tensor) -> Any:
        cls.events.append("sent")
        return tensor, None


@everywhere
def test_buckets_are_sent_while_backward_runs() -> None:
    rejoin()  # no optimizer of another test may be older
    params = [nn.Parameter(torch.ones(2)) for _ in range(3)]
    first, second, third = params
    optimizer = sgd(params, groups=[[param] for param in params], compression=Recorder)
    first.register_hook(lambda _: Recorder.events.append("first"))
    for step in range(4):
        Recorder.events = []
        optimizer.zero_grad()
        (first.tanh() * second * third).sum().backward()
        early = ["sent"] if step else []  # the third one's, when the second one's has arrived
        assert Recorder.events == [*early, "first", *["sent"] * (3 - len(early))]
