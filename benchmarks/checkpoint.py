"""Measures what saving ResNet-50 with SGD momentum costs: against a plain torch.save, and for the steps around it.

    torchrun --standalone --nproc-per-node 2 benchmarks/checkpoint.py [FOLDER]

The variants take turns, and the result is the median of the ratios of neighbouring turns, because absolute times differ
between machines. CPU seconds are those of all threads of rank 0. On busy cores, other work loses that time.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torchvision
from torch.nn import functional as F

import dualdist as hvd

BATCH, PIXELS = 4, 224
WINDOW = 3
"""Steps per window; an asynchronous save starts in the first one."""
SAVES, WINDOWS = 6, 4

Times = dict[str, list[tuple[float, float]]]


def main() -> None:
    hvd.init()
    torch.set_num_threads(1)
    model = torchvision.models.resnet50()
    sgd = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(sgd, named_parameters=model.named_parameters())
    images, labels = torch.randn(BATCH, 3, PIXELS, PIXELS), torch.randint(1000, (BATCH,))
    state = {"model": model, "optimizer": optimizer}
    folder = tempfile.TemporaryDirectory(dir=sys.argv[1] if len(sys.argv) > 1 else None)
    manager = hvd.checkpoint.CheckpointManager(folder.name, state, keep=1, asynchronous=True)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()

    def window(*, exchanges: bool, saves: bool) -> None:
        for place in range(WINDOW):
            step()
            if exchanges:
                manager.step()
            if saves and place == 0:
                manager.save()

    window(exchanges=False, saves=True)  # warm-up: creates momentum, host memory and gradients
    manager.wait()
    plain = lambda: save_plainly(state, Path(folder.name, "plain.pt"))  # noqa: E731
    ours = lambda: hvd.checkpoint.save(Path(folder.name, "ours.pt"), state)  # noqa: E731
    report("save", in_turns({"torch.save and fsync": plain, "synchronous save": ours}, SAVES, hvd.barrier))
    steps: dict[str, Callable[[], None]] = {
        f"{WINDOW} steps": lambda: window(exchanges=False, saves=False),
        "with manager.step()": lambda: window(exchanges=True, saves=False),
        "with an asynchronous save": lambda: window(exchanges=True, saves=True),
    }
    report("steps", in_turns(steps, WINDOWS, manager.wait))
    started = time.perf_counter()
    for _ in range(200):
        manager.step()
    if hvd.rank() == 0:
        print(f"manager.step() alone: {(time.perf_counter() - started) * 5e3:.0f} us")
    manager.close()


def save_plainly(state: dict[str, torch.nn.Module | torch.optim.Optimizer], path: Path) -> None:
    if hvd.rank() == 0:
        with path.open("wb") as file:
            torch.save({name: value.state_dict() for name, value in state.items()}, file)
            file.flush()
            os.fsync(file.fileno())


def in_turns(ways: dict[str, Callable[[], None]], turns: int, between: Callable[[], None]) -> Times:
    """Return (seconds, CPU seconds) of every turn of each variant. Only the CPU seconds include `between`."""
    times: Times = {name: [] for name in ways}
    for turn in range(turns):
        names = list(ways)[turn % len(ways) :] + list(ways)[: turn % len(ways)]
        for name in names:
            hvd.barrier()
            started, worked = time.perf_counter(), time.process_time()
            ways[name]()
            seconds = time.perf_counter() - started
            between()
            times[name].append((seconds, time.process_time() - worked))
    return times


def report(title: str, times: Times) -> None:
    if hvd.rank() != 0:
        return
    base = next(iter(times.values()))
    for name, taken in times.items():
        ratios = [statistics.median(a[k] / b[k] for a, b in zip(taken, base, strict=True)) for k in (0, 1)]
        wall, cpu = (statistics.median(t[k] for t in taken) for k in (0, 1))
        print(
            f"{title}: {name}: {wall:.3f} s ({ratios[0]:.3f}x; least {min(t[0] for t in taken):.3f} s), "
            f"CPU {cpu:.3f} s ({ratios[1]:.3f}x; least {min(t[1] for t in taken):.3f} s)",
            flush=True,
        )


if __name__ == "__main__":
    main()
