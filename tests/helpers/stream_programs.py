"""Random programs and trainings on several streams of a device. The same on the CPU, without streams, is the oracle.

A program makes a stream wait before it uses another stream's tensor there, and records the tensor on that stream. It
uses what dualdist returns on the stream that was the current one.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import dualdist as hvd
from dualdist.devices import streams

from .. import accelerator as simulated

COUNT, WIDTH = 6 * 512, 48
MODULUS = 251
"""All numbers are integers below it, so that sums are exact."""
Tensors = list[torch.Tensor]

CALLS: dict[str, Callable[..., Any]] = {
    "allreduce": lambda call, t: call(t, op=hvd.Sum),
    "allreduce_": lambda call, t: call(t, op=hvd.Sum),
    "grouped_allreduce": lambda call, t: call([t, t + 1], op=hvd.Sum),
    "allgather": lambda call, t: call(t),
    "grouped_allgather": lambda call, t: call([t, t + 1]),
    "broadcast": lambda call, t: call(t, 0),
    "broadcast_": lambda call, t: call(t, 0),
    "reducescatter": lambda call, t: call(t, op=hvd.Sum),
    "grouped_reducescatter": lambda call, t: call([t, t + 1], op=hvd.Sum),
    "alltoall": lambda call, t: call(t),
}


class Streams:
    """The default stream of a device, and some others. On the CPU nothing here has an effect."""

    def __init__(self, device: torch.device, count: int = 5) -> None:
        self.device = device
        self._streams: list[Any] = [None] * count
        if device.type != "cpu":
            others = (torch.Stream(device) for _ in range(count - 1))
            self._streams = [streams.current_stream(device), *others]

    def on(self, number: int) -> contextlib.AbstractContextManager[Any]:
        """Make a stream the current one in the `with` block."""
        stream = self._streams[number]
        return contextlib.nullcontext() if stream is None else streams.use_stream(stream)

    def event(self) -> Any:
        """Return an event after the work of the current stream."""
        return None if self.device.type == "cpu" else streams.record_event(self.device)

    def use(self, event: Any, *tensors: torch.Tensor) -> None:
        """Let the current stream use tensors after `event`."""
        if event is not None:
            streams.wait_event(self.device, event)
            current: Any = streams.current_stream(self.device)
            for tensor in tensors:
                streams.keep_until_done(tensor, current)

    def sleep(self, milliseconds: int) -> None:
        """Keep the current stream busy."""
        if self.device.type != "cpu":
            simulated.sleep_ms(milliseconds)


class _Program:
    def __init__(self, device: torch.device, seed: int) -> None:
        self.draw, self.streams, self.device = random.Random(seed), Streams(device), device
        self.values: list[tuple[torch.Tensor, Any]] = []
        """Tensors, each with an event after which it can be used."""
        self.handles: list[int] = []
        self.seen: Tensors = []

    def run(self, steps: int) -> Tensors:
        for _ in range(steps):
            with self.streams.on(self.draw.randrange(5)):
                if len(self.values) < 3:
                    self.make()
                self.draw.choices(list(STEPS), list(STEPS.values()))[0](self)
        while self.handles:
            self.synchronize()
        while self.values:
            self.look()
        return self.seen

    def take(self) -> torch.Tensor:
        tensor, event = self.values.pop(self.draw.randrange(len(self.values)))
        self.streams.use(event, tensor)
        return tensor

    def put(self, tensor: torch.Tensor) -> None:
        self.values.append((tensor, self.streams.event()))

    def put_result(self, result: Any) -> None:
        """Keep a result, or numbers that are made of it. All else is freed at once."""
        tensors = [result] if isinstance(result, torch.Tensor) else result
        whole = torch.cat([tensor for tensor in tensors if tensor.is_floating_point()])
        if isinstance(result, torch.Tensor) and len(result) == COUNT and self.draw.random() < 0.3:
            self.put(result)
        else:
            rows = min(len(whole), COUNT)
            summed = whole[: len(whole) // rows * rows].view(-1, rows).sum(0)
            self.put(summed.repeat(-(-COUNT // rows))[:COUNT].remainder_(MODULUS))

    def make(self) -> None:
        numbers = torch.arange(COUNT, dtype=torch.float64, device=self.device)
        self.put(numbers.mul_(self.draw.randrange(9)).add_(3 * hvd.rank()).remainder_(MODULUS))

    def compute(self) -> None:
        tensor = self.take()
        self.put((tensor * 3 + 1).remainder_(MODULUS))
        if self.draw.random() < 0.5:
            self.put(tensor)

    def change(self) -> None:
        self.put(self.take().mul_(5).add_(2).remainder_(MODULUS))

    def free(self) -> None:
        self.take()

    def look(self) -> None:
        self.seen.append(self.take().cpu())

    def sleep(self) -> None:
        self.streams.sleep(self.draw.randrange(1, 4))

    def call(self) -> None:
        name = self.draw.choice([*CALLS])
        self.put_result(CALLS[name](getattr(hvd, name), self.take()))

    def start(self) -> None:
        if len(self.handles) == 6:
            return self.synchronize()
        name = self.draw.choice([*CALLS])
        start = name[:-1] + "_async_" if name.endswith("_") else name + "_async"
        self.handles.append(CALLS[name](getattr(hvd, start), self.take()))
        if self.draw.random() < 0.5:
            hvd.barrier()  # after which the call has been started, and the memory of its input may be used again
            self.make()

    def poll(self) -> None:
        if self.handles:
            hvd.poll(self.draw.choice(self.handles))

    def synchronize(self) -> None:
        if self.handles:
            self.put_result(hvd.synchronize(self.handles.pop(self.draw.randrange(len(self.handles)))))


STEPS: dict[Callable[[_Program], None], int] = {
    _Program.make: 2,
    _Program.compute: 3,
    _Program.change: 2,
    _Program.free: 1,
    _Program.look: 1,
    _Program.sleep: 1,
    _Program.call: 3,
    _Program.start: 5,
    _Program.poll: 1,
    _Program.synchronize: 4,
}
"""What a program does, and how often."""


def program(device: torch.device, seed: int) -> Tensors:
    """Run the random program `seed`, and return what it has read."""
    return _Program(device, seed).run(60)


class _Branches(nn.Module):
    """Adds the outputs of its parts, each of which has a stream."""

    def __init__(self, streams: Streams, parts: dict[int, nn.Module]) -> None:
        super().__init__()
        self.streams, self.numbers, self.parts = streams, [*parts], nn.ModuleList(parts.values())

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        before, branches = self.streams.event(), []
        for number, part in zip(self.numbers, self.parts, strict=True):
            with self.streams.on(number):
                self.streams.use(before, inputs)
                branches.append((part(inputs), self.streams.event()))
        for outputs, done in branches:
            self.streams.use(done, outputs)
        return torch.stack([outputs for outputs, _ in branches]).sum(0)


class _Late(nn.Module):
    """Keeps its stream busy in backward."""

    def __init__(self, streams: Streams) -> None:
        super().__init__()
        self.streams = streams

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        inputs.register_hook(lambda grad: self.streams.sleep(2))
        return inputs


def halves(state: object, bucket: Any) -> Any:
    """A hook that is no part of torch, so that it runs in a thread, with a result in memory of its own."""
    future = default_hooks.allreduce_hook(None, bucket)  # type: ignore[arg-type]
    return future.then(lambda done: done.value() / 2)


HOOKS: tuple[Any, ...] = (None, None, default_hooks.fp16_compress_hook, halves)


def training(device: torch.device, seed: int) -> Tensors:
    """Train a random network on random streams; return its gradients in each step, and its parameters at the end."""
    draw, streams = random.Random(seed), Streams(device)
    torch.manual_seed(seed)

    def part() -> nn.Module:
        layers = [nn.Linear(WIDTH, WIDTH), *[_Late(streams)] * (draw.random() < 0.4), nn.Tanh()]
        return nn.Sequential(*layers)

    blocks = [draw.sample(range(5), draw.randrange(1, 4)) for _ in range(3)]
    network = nn.Sequential(*(_Branches(streams, {number: part() for number in block}) for block in blocks))
    network.to(device, torch.float64)
    accumulators = []
    for param in network.parameters():  # torch adds a gradient on the stream on which this was made
        with streams.on(draw.randrange(5)):
            accumulators.append(param.view_as(param).grad_fn)
    inputs = torch.randn(8, WIDTH, dtype=torch.float64, device="cpu").add_(hvd.rank()).to(device)
    model: Any = network
    optimizer: Any = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    hook, passes, cap = draw.choice(HOOKS), draw.choice([1, 1, 2]), draw.choice([0.02, 0.05, 25])
    is_module, main, back = draw.random() < 0.5, draw.randrange(5), draw.randrange(5)
    if hvd.transport_name() == "gloo":  # torch's group cannot send tensors of the device
        hook = None
    if is_module:
        model = hvd.DistributedDataParallel(network, bucket_cap_mb=cap)
        if hook is not None:
            model.register_comm_hook(None, hook)
    else:
        params = [*network.parameters()]
        groups = None if cap == 25 else [params[start : start + 3] for start in range(0, len(params), 3)]
        optimizer = hvd.DistributedOptimizer(optimizer, backward_passes_per_step=passes, comm_hook=hook, groups=groups)
    found: Tensors = []
    ready = streams.event()
    with warnings.catch_warnings(), streams.on(main):
        # of torch since 2.10: the gradient of a parameter is added on another stream than it was computed on
        warnings.filterwarnings("ignore", "The AccumulateGrad node's stream", UserWarning)
        streams.use(ready)
        for _ in range(4):
            optimizer.zero_grad()
            for left in reversed(range(passes)):
                with model.no_sync() if left and is_module else contextlib.nullcontext():
                    loss = model(inputs).square().mean()
                    forward = streams.event()
                    with streams.on(back):
                        streams.use(forward, loss)
                        loss.backward()
                        done = streams.event()
                    streams.use(done)
            found += [param.grad.clone() for param in network.parameters() if param.grad is not None]
            optimizer.step()
        return [tensor.detach().cpu() for tensor in (*found, *network.parameters())]


DELAYS: dict[Callable[..., Tensors], tuple[int, int, int]] = {program: (300, 3000, 300), training: (500, 5000, 500)}
"""Microseconds, at most, of the kernels of the default streams, of other streams, and of collectives."""


def differences(run: Callable[[torch.device, int], Tensors], seeds: Iterable[int]) -> list[int]:
    """Return the seeds with which this rank gets other numbers on its device than on the CPU."""
    found = []
    simulated.set_delays(*DELAYS[run])
    for seed in seeds:
        own, expected = run(hvd.device(), seed), run(torch.device("cpu"), seed)
        if not all(itertools.starmap(torch.allclose, zip(own, expected, strict=True))):
            found.append(seed)
    simulated.set_delays(0, 0, 0)
    return found
