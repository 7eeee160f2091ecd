"""How much of backward is left when a byte of the gradients is sent, beside torch's DDP. No time is measured.

Backward is counted in bytes of gradients: it takes about as long for each. The mean over all bytes that are sent is at
least that of DDP for layers in any order of registration, because buckets follow the order in which gradients arrive.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import dualdist as hvd
from dualdist.core.world import channel_of

from ..helpers.exchanges import reductions
from ..helpers.rejoining import rejoin
from ..helpers.world import everywhere

WIDTH, CAP = 512, 4
"""A layer of this width has 1 MiB: four of them fill a bucket."""


class Block(nn.Module):
    """A linear layer after a norm, which may have another dtype."""

    def __init__(self, inputs: int, body: torch.dtype, norm: torch.dtype) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(inputs, dtype=norm)
        self.linear = nn.Linear(inputs, WIDTH, dtype=body)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        normed = self.norm(inputs.to(self.norm.weight.dtype))
        return self.linear(normed.to(self.linear.weight.dtype)).relu()  # type: ignore[no-any-return]


class Layers(nn.Module):
    """A stem, ten blocks and a head, used in this order, or with the blocks reversed."""

    def __init__(self, body: torch.dtype = torch.float32, norm: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH, dtype=body)
        self.blocks = nn.Sequential(*[Block(WIDTH, body, norm) for _ in range(10)])
        self.head = nn.Linear(WIDTH, WIDTH, dtype=norm)
        self.is_reversed = False

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.stem(inputs.to(self.stem.weight.dtype))
        for block in reversed(self.blocks) if self.is_reversed else self.blocks:
            hidden = block(hidden)
        return self.head(hidden.to(self.head.weight.dtype)).sum()  # type: ignore[no-any-return]


class UNet(nn.Module):
    """Blocks on the way down, in the middle and on the way up, registered in the order of diffusers' UNets."""

    def __init__(self) -> None:
        super().__init__()
        kinds = torch.float32, torch.float32
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.time = nn.Linear(WIDTH, WIDTH)
        self.down = nn.ModuleList([Block(WIDTH, *kinds) for _ in range(4)])
        self.up = nn.ModuleList([Block(2 * WIDTH, *kinds) for _ in range(4)])
        self.middle = Block(WIDTH, *kinds)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        time, hidden, skipped = self.time(inputs), self.stem(inputs), []
        for block in self.down:
            hidden = block(hidden + time)
            skipped.append(hidden)
        hidden = self.middle(hidden + time)
        for block in self.up:
            hidden = block(torch.cat([hidden + time, skipped.pop()], dim=1))
        return self.head(hidden).sum()  # type: ignore[no-any-return]


def last_first(model: nn.Module) -> nn.Module:
    """Return `model` with the layer that is used first registered last."""
    model._modules["stem"] = model._modules.pop("stem")
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "usual order": Layers,
    "head and norms of another dtype": lambda: Layers(body=torch.float64),
    "used first, registered last": lambda: last_first(Layers()),
    "UNet": UNet,
}


class Backwards:
    """Counts, in a backward, how many bytes of gradients are complete when bytes are sent."""

    def __init__(self, model: nn.Module) -> None:
        self.params = list(model.parameters())
        for param in self.params:
            param.register_hook(self.count)
        self.start_over()

    def start_over(self) -> None:
        self.complete, self.sent = 0, list[tuple[int, int]]()

    def count(self, grad: torch.Tensor) -> None:
        self.complete += grad.nbytes

    def record(self, tensor: torch.Tensor) -> None:
        self.sent.append((tensor.nbytes, self.complete))

    def run(self, wrapped: Callable[[torch.Tensor], torch.Tensor], times: int) -> float:
        """Return how much of the last backward is left when a byte is sent, the mean over all bytes."""
        for _ in range(times):
            for param in self.params:
                param.grad = None
            self.start_over()
            wrapped(torch.ones(2, WIDTH) * (hvd.rank() + 1)).backward()
        left = sum(nbytes * (self.complete - complete) for nbytes, complete in self.sent)
        return left / self.complete / sum(nbytes for nbytes, _ in self.sent)


def sends_recorded(record: Callable[[torch.Tensor], object]) -> contextlib.AbstractContextManager[None]:
    return reductions(channel_of(hvd.global_process_set).gradients, record)


def distributed(model: nn.Module) -> Any:
    """Return `model`, wrapped in a new world: no wrapper of another test may be older."""
    rejoin()
    return hvd.DistributedDataParallel(model, bucket_cap_mb=CAP)


def share_of_ddp(model: nn.Module) -> float:
    found = Backwards(model)
    wrapped = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=CAP)

    def done(tensor: torch.Tensor) -> Any:
        found.record(tensor)
        future: Any = torch.futures.Future()
        future.set_result(tensor)
        return future

    wrapped.register_comm_hook(None, lambda _, bucket: done(bucket.buffer()))
    return found.run(wrapped, 4)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.ranks(1, 2)
@everywhere
def test_as_much_of_backward_is_left_as_in_ddp(name: str) -> None:
    model = MODELS[name]()
    found, wrapped = Backwards(model), distributed(model)
    with sends_recorded(found.record):
        found.run(wrapped, 1)  # after it, the order is known
        share = found.run(wrapped, 3)
    assert share >= share_of_ddp(MODELS[name]()) > 0.3


@pytest.mark.ranks(1, 2)
@everywhere
def test_frozen_layers_do_not_delay_the_others() -> None:
    model: Any = Layers()
    found, wrapped = Backwards(model), distributed(model)
    with sends_recorded(found.record):
        found.run(wrapped, 2)
        model.head.requires_grad_(False)  # it is in the first bucket
        found.run(wrapped, 10)
        frozen = found.run(wrapped, 1)
        model.head.requires_grad_(True)
        found.run(wrapped, 20)
        thawed = found.run(wrapped, 1)
    assert frozen > 0.3 and thawed > 0.3


@pytest.mark.only_ci
@pytest.mark.ranks(1, 2)
@everywhere
def test_buckets_do_not_change_to_and_fro() -> None:
    model: Any = Layers()
    found, wrapped = Backwards(model), distributed(model)
    shares: list[float] = []
    with sends_recorded(found.record):
        for number in range(120):
            model.is_reversed = number % 24 < 12
            shares.append(found.run(wrapped, 1))
    # Buckets change after the first backward, and after ten in the other order. Then they stay.
    assert min(shares[1:12]) > 0.3 > max(shares[12:22]) and shares[22] > 0.3
    assert shares[24:] == shares[24:48] * 4


@pytest.mark.ranks(1, 2)
@everywhere
def test_two_models_that_train_in_turn_both_send_during_backward_until_one_backward_has_both() -> None:
    models = Layers(), Layers()
    first, second = map(Backwards, models)
    wrapped = distributed(models[0]), hvd.DistributedDataParallel(models[1], bucket_cap_mb=CAP)
    with sends_recorded(first.record), sends_recorded(second.record):
        for _ in range(12):
            shares = first.run(wrapped[0], 1), second.run(wrapped[1], 1)
        assert min(shares) > 0.3
        second.run(lambda inputs: wrapped[1](inputs) + wrapped[0](inputs), 1)
        assert second.run(wrapped[1], 1) == 0.0
