"""One training loop, what it can be told to do, and the styles in which ranks take part in it.

The loop knows neither backend nor style: a `Style` wraps networks and optimizers and returns what the loop uses. The
style `alone` is plain torch with the whole batch, the oracle of the others. Each loss is a sum divided by the nominal
number of rows, so that the mean over ranks is that of the whole batch also when some ranks have no rows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import dualdist as hvd

STEPS, ROWS, FEATURES = 12, 4, 5
"""Rows are per rank and micro-batch."""
OVERFLOW_STEP, THAW_STEP = 4, 6

Tensors = tuple[torch.Tensor, torch.Tensor]
Loss = Callable[[Sequence[nn.Module], torch.Tensor, torch.Tensor], torch.Tensor]
"""(networks, inputs, targets) -> the sum over the rows."""


@dataclass(frozen=True)
class Scenario:
    """What the loop does beyond forward, backward and step. The defaults are a plain training."""

    networks: Callable[[], list[nn.Module]] = lambda: [_network()]
    losses: tuple[Loss, ...] = field(default=(lambda nets, x, y: _squares(nets[0](x), y),))
    """One per network and optimizer, which take turns."""
    # With foreach, which is the default on GPUs, a step with nesterov changes the gradients (torch/optim/sgd.py).
    optimizer: Callable[[Any], torch.optim.Optimizer] = lambda params: torch.optim.SGD(
        params, lr=0.02, momentum=0.9, nesterov=True, foreach=False
    )
    micro_batches: int = 1
    max_norm: float | None = None
    autocast: torch.dtype | None = None
    scaled: bool = False
    """Whether a GradScaler is used, and one rank's loss overflows once."""
    closure: bool = False
    same_batch: bool = False
    """Whether every step has the same batch, as line searches and curvatures need it."""
    uneven: bool = False
    """Whether the last batch has rows for rank 0 alone, and only half of them."""
    before_step: Callable[[int, Sequence[nn.Module]], None] = lambda number, networks: None


@dataclass(frozen=True)
class Pieces:
    """What a style makes of networks and optimizers."""

    networks: Sequence[nn.Module]
    optimizers: Sequence[torch.optim.Optimizer]
    accumulating: Callable[[], AbstractContextManager[None]] = nullcontext
    """Around every micro-batch but the last."""
    training: Callable[[], AbstractContextManager[None]] = nullcontext
    """Around the whole loop."""
    average: Callable[[torch.optim.Optimizer, int], None] = lambda optimizer, shares: None
    """Divide the gradients by the number of shares of this process."""
    mean: Callable[[torch.Tensor], torch.Tensor] = lambda loss: loss
    """A loss over all ranks."""


Style = Callable[[list[nn.Module], Scenario], Pieces]


@dataclass(frozen=True)
class Outcome:
    """What a training has come to. A gradient that does not exist is zero."""

    gradients: dict[str, torch.Tensor]
    """By parameter: (step, numel), as the optimizer has used them."""
    state: dict[str, torch.Tensor]
    """Weights and buffers at the end."""
    scales: list[float]
    """The loss scale after each step."""


def train(
    scenario: Scenario,
    style: Style,
    dtype: torch.dtype,
    size: int,
    shares: Sequence[Sequence[int]],
    device: str = "cpu",
) -> Outcome:
    """Train with the rows of some of `size` ranks. Collective as `style` is.

    shares: whose rows go through the networks together, such as [[0, 1]] for the whole batch of two ranks.
    """
    torch.manual_seed(0)
    plain = [network.to(device, dtype) for network in scenario.networks()]
    pieces = style(plain, scenario)
    scaler = torch.amp.GradScaler(device, enabled=scenario.scaled, init_scale=2.0**10, growth_interval=5)
    gradients: dict[str, list[torch.Tensor]] = {name: [] for name, _ in _named(plain)}
    scales: list[float] = []
    with pieces.training():
        for number, batch in enumerate(_batches(scenario, dtype, size, shares)):
            micro_batches = [(inputs.to(device), targets.to(device)) for inputs, targets in batch]
            if not all(len(inputs) for inputs, _ in micro_batches):
                break
            scenario.before_step(number, plain)
            for turn in range(len(plain)):
                _step(scenario, pieces, turn, micro_batches, len(shares), ROWS * len(shares[0]), scaler)
                for name, param in _named([plain[turn]], turn):
                    grad = torch.zeros_like(param) if param.grad is None else param.grad
                    gradients[name].append(grad.detach().flatten().cpu().clone())
            scales.append(scaler.get_scale())
    state = {
        f"{turn}.{name}": tensor.cpu()
        for turn, network in enumerate(plain)
        for name, tensor in network.state_dict().items()
    }
    return Outcome({name: torch.stack(each) for name, each in gradients.items()}, state, scales)


def _step(
    scenario: Scenario, pieces: Pieces, turn: int, micro_batches: Sequence[Tensors], shares: int, rows: int, scaler: Any
) -> None:
    optimizer, network = pieces.optimizers[turn], pieces.networks[turn]

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        for left, (inputs, targets) in zip(reversed(range(len(micro_batches))), micro_batches, strict=True):
            with (
                pieces.accumulating() if left else nullcontext(),
                torch.autocast(inputs.device.type, scenario.autocast, enabled=scenario.autocast is not None),
            ):
                loss = scenario.losses[turn](pieces.networks, inputs, targets) / rows
                scaler.scale(loss).backward()
        pieces.average(optimizer, shares)
        return loss.detach()

    if scenario.closure:
        optimizer.step(lambda: pieces.mean(closure()).item())
        return
    closure()
    scaler.unscale_(optimizer)
    if scenario.max_norm is not None:
        norm = nn.utils.clip_grad_norm_(network.parameters(), scenario.max_norm)
        assert norm > scenario.max_norm
    scaler.step(optimizer)
    scaler.update()


def _batches(
    scenario: Scenario, dtype: torch.dtype, size: int, shares: Sequence[Sequence[int]]
) -> Iterator[list[Tensors]]:
    """Yield each share's rows in the micro-batches of each step."""
    generator = torch.Generator()
    for number in range(STEPS):
        there = ROWS // 2 if scenario.uneven and number == STEPS - 1 else ROWS * size
        generator.manual_seed(0 if scenario.same_batch else number)
        step = []
        for _ in range(scenario.micro_batches):
            inputs = torch.randn(ROWS * size, FEATURES, generator=generator, dtype=torch.float64)
            inputs[:, 0] = torch.arange(ROWS * size).ge(ROWS)  # which rows are not rank 0's
            targets = inputs.sin().sum(dim=1, keepdim=True)
            if scenario.scaled and number == OVERFLOW_STEP:
                targets[-1] = torch.inf
            for members in shares:
                own = [row for rank in members for row in range(ROWS * rank, ROWS * (rank + 1)) if row < there]
                step.append((inputs[own].to(dtype), targets[own].to(dtype)))
        yield step


def _named(networks: Sequence[nn.Module], start: int = 0) -> Iterator[tuple[str, nn.Parameter]]:
    for turn, network in enumerate(networks, start):
        for name, param in network.named_parameters():
            yield f"{turn}.{name}", param


# Styles


def alone(networks: list[nn.Module], scenario: Scenario) -> Pieces:
    """Train in this process, without dualdist."""

    def average(optimizer: torch.optim.Optimizer, shares: int) -> None:
        for param in optimizer.param_groups[0]["params"]:
            if param.grad is not None:
                param.grad /= shares

    optimizers = [scenario.optimizer(network.parameters()) for network in networks]
    return Pieces(networks, optimizers, average=average)


def _with_optimizers(networks: list[nn.Module], scenario: Scenario) -> Pieces:
    _convert(networks)
    optimizers = [
        hvd.DistributedOptimizer(
            scenario.optimizer(network.parameters()),
            network.named_parameters(),
            backward_passes_per_step=scenario.micro_batches,
        )
        for network in networks
    ]
    _start_equal(networks)

    @contextlib.contextmanager
    def training() -> Iterator[None]:
        yield
        last = hvd.join()
        for network in networks:
            hvd.broadcast_parameters(network.state_dict(), last)

    around = training if scenario.uneven else nullcontext
    return Pieces(networks, optimizers, training=around, mean=hvd.allreduce)


def _with_modules(networks: list[nn.Module], scenario: Scenario) -> Pieces:
    _convert(networks)
    wrapped = [hvd.DistributedDataParallel(network) for network in networks]
    optimizers = [scenario.optimizer(network.parameters()) for network in wrapped]

    @contextlib.contextmanager
    def accumulating() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for network in wrapped:
                stack.enter_context(network.no_sync())
            yield

    @contextlib.contextmanager
    def training() -> Iterator[None]:
        with wrapped[0].join(enable=scenario.uneven):
            yield

    return Pieces(wrapped, optimizers, accumulating, training, mean=hvd.allreduce)


STYLES: dict[str, Style] = {"optimizer": _with_optimizers, "ddp": _with_modules}


def _convert(networks: Sequence[nn.Module]) -> None:
    """Make batch normalisation one over all ranks, and the weights differ between ranks: wrapping makes them equal."""
    for network in networks:
        hvd.SyncBatchNorm.convert_sync_batchnorm(network)
        with torch.no_grad():
            for param in network.parameters():
                param.add_(hvd.rank())


def _start_equal(networks: Sequence[nn.Module]) -> None:
    for network in networks:
        hvd.broadcast_parameters(network.state_dict(), root_rank=0)


# Scenarios


def _squares(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs.float() - targets if outputs.dtype is torch.bfloat16 else outputs - targets).square().sum()


def _network(*first: nn.Module) -> nn.Sequential:
    return nn.Sequential(*(first or [nn.Linear(FEATURES, 8)]), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


class _Sparing(nn.Module):
    """Has a layer that rank 0's rows do not use, and one that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.extra, self.never = _network(), nn.Linear(FEATURES, 1), nn.Linear(2, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.body(inputs)
        (rows,) = inputs[:, 0].nonzero(as_tuple=True)
        return outputs.index_add(0, rows, self.extra(inputs[rows])) if len(rows) else outputs


def _thaw(number: int, networks: Sequence[nn.Module]) -> None:
    """Train without the first layer until THAW_STEP."""
    for param in next(networks[0].children()).parameters():
        param.requires_grad_(number >= THAW_STEP)


def _judge_loss(networks: Sequence[nn.Module], inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    maker, judge = networks
    return _squares(judge(inputs), targets) + _squares(judge(maker(inputs).detach()), -targets)


def _maker_loss(networks: Sequence[nn.Module], inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    maker, judge = networks
    return _squares(judge(maker(inputs)), targets)


SCENARIOS = {
    "plain": Scenario(),
    "accumulate": Scenario(micro_batches=3),
    "clip": Scenario(max_norm=0.05),
    "fp16-scaler": Scenario(autocast=torch.float16, scaled=True),
    "bf16": Scenario(autocast=torch.bfloat16),
    "sync-batch-norm": Scenario(lambda: [_network(nn.Linear(FEATURES, 8, bias=False), nn.BatchNorm1d(8))]),
    "unused": Scenario(lambda: [_Sparing()]),
    "frozen": Scenario(before_step=_thaw),
    "two-optimizers": Scenario(lambda: [nn.Linear(FEATURES, FEATURES), _network()], (_maker_loss, _judge_loss)),
    "closure": Scenario(
        lambda: [nn.Linear(FEATURES, 1, bias=False)],
        optimizer=lambda params: torch.optim.LBFGS(params, lr=0.05, max_iter=3, history_size=3),
        closure=True,
        same_batch=True,
    ),
    "uneven": Scenario(uneven=True),
}
