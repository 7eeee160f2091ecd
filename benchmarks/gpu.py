"""Measures training on GPUs beside plain torch and torch's DDP, in turns in the same processes.

    python benchmarks/gpu.py                          # one rank
    python benchmarks/gpu.py --ranks 8 --models resnet50
    python benchmarks/gpu.py --device cpu --rounds 2  # whether it runs, with tiny models and without a GPU

Prints a table for each model: milliseconds of a step, its ratio to DDP's (the median over the rounds, the smallest and
the greatest), waits of the host for the device in a step (0 is the aim), and the memory of model, optimizer and step.
bfloat16 autocast. One of ours at a time is beside the peers, in processes of its own: a second one sends late at first.
NCCL 2.30 lets two ranks share one GPU, with NCCL_MULTI_RANK_GPU_ENABLE=1.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile

import dualdist as hvd

MARK = "result: "
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")
Wrapped = tuple[nn.Module, Any]
Step = Callable[[], None]


class Bottleneck(nn.Module):
    """The block of ResNet-50, for machines without torchvision."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs, layers = 4 * width, []
        for i, o, kernel, step in ((inputs, width, 1, 1), (width, width, 3, stride), (width, outputs, 1, 1)):
            layers += [nn.Conv2d(i, o, kernel, step, kernel // 2, bias=False), nn.BatchNorm2d(o), nn.ReLU(True)]
        self.main = nn.Sequential(*layers[:-1])
        self.short: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.short = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.main(x) + self.short(x))


def resnet50() -> nn.Module:
    """Return torchvision's ResNet-50, or the same written here."""
    if importlib.util.find_spec("torchvision") is not None:
        from torchvision.models import resnet50 as made

        return made()  # type: ignore[no-any-return]
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(True)]
    layers.append(nn.MaxPool2d(3, 2, 1))
    inputs = 64
    for place, blocks in enumerate((3, 4, 6, 3)):
        for block in range(blocks):
            width = 64 << place
            layers.append(Bottleneck(inputs, width, 2 if place and not block else 1))
            inputs = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 1000))


def transformer(width: int, heads: int) -> nn.Module:
    layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 12, enable_nested_tensor=False)


MODELS: dict[str, Callable[[bool], tuple[nn.Module, torch.Tensor]]] = {
    "resnet50": lambda is_gpu: (resnet50(), torch.randn((64, 3, 224, 224) if is_gpu else (2, 3, 32, 32))),
    "transformer": lambda is_gpu: (
        (transformer(768, 12), torch.randn(8, 256, 768)) if is_gpu else (transformer(16, 2), torch.randn(2, 4, 16))
    ),
    "small": lambda is_gpu: (nn.Sequential(*[nn.Linear(64, 64) for _ in range(120)]), torch.randn(32, 64)),
}
"""name -> function that returns the network and a batch of one rank."""


def plain(model: nn.Module, optimizer: torch.optim.Optimizer) -> Wrapped:
    return model, optimizer


def ddp(model: nn.Module, optimizer: torch.optim.Optimizer) -> Wrapped:
    device = next(model.parameters()).device
    on_gpu = device.type == "cuda" and hvd.backend_name() == "horovod"  # its group for scripts is of gloo
    group = dist.new_group(backend="nccl") if on_gpu else None
    return nn.parallel.DistributedDataParallel(model, process_group=group), optimizer


def ddp_synchronized(model: nn.Module, optimizer: torch.optim.Optimizer) -> Wrapped:
    return ddp(nn.SyncBatchNorm.convert_sync_batchnorm(model), optimizer)


def module(model: nn.Module, optimizer: torch.optim.Optimizer) -> Wrapped:
    return hvd.DistributedDataParallel(model), optimizer


def module_synchronized(model: nn.Module, optimizer: torch.optim.Optimizer) -> Wrapped:
    return module(hvd.SyncBatchNorm.convert_sync_batchnorm(model), optimizer)


def optimizer_style(model: nn.Module, optimizer: torch.optim.Optimizer) -> Wrapped:
    return model, hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())


def horovod(model: nn.Module, optimizer: torch.optim.Optimizer) -> Wrapped:
    import horovod.torch

    return model, horovod.torch.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())


@dataclass(frozen=True)
class Contest:
    """What is measured in turns in the same processes. The last one is ours; "DDP" is what others are compared with."""

    wraps: dict[str, Callable[[nn.Module, torch.optim.Optimizer], Wrapped]]
    backend: str = "torch"
    models: tuple[str, ...] = tuple(MODELS)


PEERS = {"torch": plain, "DDP": ddp}
CONTESTS = {
    "module": Contest({**PEERS, "dualdist module": module}),
    "optimizer": Contest({**PEERS, "dualdist optimizer": optimizer_style}),
    "SyncBatchNorm": Contest(
        {**PEERS, "DDP": ddp_synchronized, "dualdist module": module_synchronized}, models=("resnet50",)
    ),
    "Horovod": Contest(
        {**PEERS, "Horovod": horovod, "dualdist optimizer on Horovod": optimizer_style}, backend="horovod"
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure training on GPUs.")
    parser.add_argument("--device", default="cuda", help="cuda or cpu (%(default)s)")
    parser.add_argument("--ranks", type=int, default=1, help="processes, each with a GPU (%(default)s)")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--contests", nargs="+", choices=CONTESTS, default=list(CONTESTS))
    parser.add_argument("--rounds", type=int, default=9, help="%(default)s")
    parser.add_argument("--steps", type=int, default=8, help="of each in each round (%(default)s)")
    parser.add_argument("--json", help="file for the results")
    parser.add_argument("--contest", help=argparse.SUPPRESS)
    settings = parser.parse_args()
    if settings.contest:
        measure(settings)
        return
    if settings.device == "cuda" and not torch.cuda.is_available():
        print(f"benchmarks/gpu.py needs a device: torch {torch.__version__} sees no GPU here.")
        return
    results = {
        name: run(name, settings)
        for name in settings.contests
        if CONTESTS[name].backend == "torch" or importlib.util.find_spec("horovod") is not None
    }
    for name, models in results.items():
        for model, rows in (models or {"failed": {}}).items():
            print(f"\n{name}, {model}\n{'':32}{'ms':>8}{'of DDP':>24}{'waits':>7}{'MB':>8}")
            for wrap, row in rows.items():
                ratio = "{:.3f} ({:.2f} to {:.2f})".format(*row["ratio"])
                print(f"{wrap:32}{row['ms']:8.2f}{ratio:>24}{row['waits']:7d}{row['megabytes']:8.0f}")
    if settings.json:
        with open(settings.json, "w") as file:
            json.dump(results, file, indent=2)


def run(name: str, settings: argparse.Namespace) -> dict[str, Any] | None:
    """Return the results of a contest, by model; None if it fails."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={settings.ranks}", __file__, "--contest", name]
    for option in ("device", "rounds", "steps"):
        command += [f"--{option}", str(getattr(settings, option))]
    models = [model for model in CONTESTS[name].models if model in settings.models]
    environment = {
        **os.environ,
        "DUALDIST_BACKEND": CONTESTS[name].backend,
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }
    done = subprocess.run([*command, "--models", *models], env=environment, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    if not lines:
        print(f"{name} failed:\n{done.stderr[-3000:]}", file=sys.stderr)
        return None
    return json.loads(lines[-1].removeprefix(MARK))  # type: ignore[no-any-return]


def measure(settings: argparse.Namespace) -> None:
    """Train each model with each wrapper in turns, and print the results on rank 0."""
    hvd.init()
    device = torch.device("cuda", torch.cuda.current_device()) if settings.device == "cuda" else hvd.device()
    contest = CONTESTS[settings.contest]
    results = {name: compared(contest, name, device, settings) for name in settings.models}
    if hvd.rank() == 0:
        print(MARK + json.dumps(results), flush=True)
    hvd.shutdown()


def compared(contest: Contest, name: str, device: torch.device, settings: argparse.Namespace) -> dict[str, Any]:
    """Return milliseconds, ratio, waits and megabytes of each wrapper of a contest for one model."""
    made = {wrap: trainer(name, function, device) for wrap, function in contest.wraps.items()}
    taken: dict[str, list[float]] = {wrap: [] for wrap in made}
    order = list(made)
    for number in range(settings.rounds):
        for wrap in order[number % len(order) :] + order[: number % len(order)]:
            taken[wrap].append(milliseconds(made[wrap][0], settings.steps, device))
    ratios = {wrap: [a / b for a, b in zip(taken[wrap], taken["DDP"], strict=True)] for wrap in made}
    return {
        wrap: {
            "ms": statistics.median(taken[wrap]),
            "ratio": [statistics.median(ratios[wrap]), min(ratios[wrap]), max(ratios[wrap])],
            "waits": host_waits(step) if device.type == "cuda" else 0,
            "megabytes": megabytes,
        }
        for wrap, (step, megabytes) in made.items()
    }


def trainer(
    name: str, wrap: Callable[[nn.Module, torch.optim.Optimizer], Wrapped], device: torch.device
) -> tuple[Step, float]:
    """Return a function that makes one step of a wrapped model, and the memory that this takes, in MB."""
    gc.collect()
    is_gpu = device.type == "cuda"
    before = torch.cuda.memory_allocated() if is_gpu else 0
    if is_gpu:
        torch.cuda.reset_peak_memory_stats()
    torch.manual_seed(0)
    network, batch = MODELS[name](is_gpu)
    network, inputs = network.to(device), batch.to(device)
    model, optimizer = wrap(network, torch.optim.SGD(network.parameters(), lr=1e-4, momentum=0.9))

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16):
            loss = model(inputs).float().square().mean()
        loss.backward()
        optimizer.step()

    for _ in range(4):
        step()
    return step, (torch.cuda.max_memory_allocated() - before) / 1e6 if is_gpu else 0.0


def milliseconds(step: Step, steps: int, device: torch.device) -> float:
    """Return the time of a step."""
    synchronize(device)
    begin = time.perf_counter()
    for _ in range(steps):
        step()
    synchronize(device)
    return (time.perf_counter() - begin) / steps * 1e3


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def host_waits(step: Step) -> int:
    """Return how often the host waits for the device in one step."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        step()
    # The profiler itself waits once at its end.
    return max(0, sum(event.name in WAITS for event in trace.events() or []) - 1)


if __name__ == "__main__":
    main()
