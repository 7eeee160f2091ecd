"""Measures training of ResNet-50 on one GPU: plain torch, torch's DDP, and dualdist, each in processes of its own.

    python benchmarks/gpu.py
    python benchmarks/gpu.py --device cpu --images 32 --batch 2 --steps 2     # whether it runs, without a GPU

Prints a table: images per second of all ranks together, waits of the host for the device in one step (0 is the aim),
and the peak memory of rank 0. bfloat16 autocast, channels last. Horovod is measured if it is installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile

import dualdist as hvd

MARK = "result: "
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")
Model = nn.Module
Step = Callable[[], None]


class Bottleneck(nn.Module):
    """The block of ResNet-50, for machines without torchvision."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs, layers = 4 * width, []
        for i, o, kernel, step in ((inputs, width, 1, 1), (width, width, 3, stride), (width, outputs, 1, 1)):
            layers += [
                nn.Conv2d(i, o, kernel, step, kernel // 2, bias=False),
                nn.BatchNorm2d(o),
                nn.ReLU(True),
            ]
        self.main = nn.Sequential(*layers[:-1])
        self.short: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.short = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

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


def plain(model: Model, optimizer: torch.optim.Optimizer) -> tuple[Model, Any]:
    return model, optimizer


def ddp(model: Model, optimizer: torch.optim.Optimizer) -> tuple[Model, Any]:
    dist.init_process_group()
    return nn.parallel.DistributedDataParallel(model), optimizer


def optimizer_style(model: Model, optimizer: torch.optim.Optimizer) -> tuple[Model, Any]:
    return model, hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())


def module_style(model: Model, optimizer: torch.optim.Optimizer) -> tuple[Model, Any]:
    return hvd.DistributedDataParallel(model), optimizer


def synchronized(model: Model, optimizer: torch.optim.Optimizer) -> tuple[Model, Any]:
    return module_style(hvd.SyncBatchNorm.convert_sync_batchnorm(model), optimizer)


CONTESTANTS: dict[str, tuple[Callable[..., tuple[Model, Any]], int, dict[str, str]]] = {
    "torch": (plain, 1, {}),
    "torch DDP": (ddp, 1, {}),
    "dualdist optimizer": (optimizer_style, 1, {"DUALDIST_BACKEND": "torch"}),
    "dualdist module": (module_style, 1, {"DUALDIST_BACKEND": "torch"}),
    "dualdist module, SyncBatchNorm": (synchronized, 1, {"DUALDIST_BACKEND": "torch"}),
    "dualdist, 2 ranks on gloo": (
        module_style,
        2,
        {"DUALDIST_BACKEND": "torch", "DUALDIST_TRANSPORT": "gloo"},
    ),
    "dualdist, 2 ranks on Horovod": (optimizer_style, 2, {"DUALDIST_BACKEND": "horovod"}),
}
"""name -> (function that wraps model and optimizer, ranks, environment)"""


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure training on one GPU.")
    parser.add_argument("--device", default="cuda", help="cuda or cpu (%(default)s)")
    parser.add_argument("--images", type=int, default=224, help="width and height in pixels (%(default)s)")
    parser.add_argument("--batch", type=int, default=64, help="images per rank and step (%(default)s)")
    parser.add_argument("--steps", type=int, default=30, help="measured steps (%(default)s)")
    parser.add_argument("--json", help="file for the results")
    parser.add_argument("--contestant", help=argparse.SUPPRESS)
    settings = parser.parse_args()
    if settings.contestant:
        measure(settings)
        return
    if settings.device == "cuda" and not torch.cuda.is_available():
        print(f"benchmarks/gpu.py needs a device: torch {torch.__version__} sees no GPU here.")
        return
    results = {name: run(name, settings) for name in CONTESTANTS if is_possible(name)}
    print(f"{'':32}{'images/s':>10}{'host waits':>12}{'peak MB':>9}")
    for name, found in results.items():
        shown = "failed" if found is None else "{images:10.1f}{waits:12d}{megabytes:9.0f}".format(**found)
        print(f"{name:32}{shown:>10}")
    if settings.json:
        with open(settings.json, "w") as file:
            json.dump(results, file, indent=2)


def is_possible(name: str) -> bool:
    return "Horovod" not in name or importlib.util.find_spec("horovod") is not None


def run(name: str, settings: argparse.Namespace) -> dict[str, Any] | None:
    """Return the result of a contestant, or None if it fails."""
    _, size, variables = CONTESTANTS[name]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"]
    command += [__file__, "--contestant", name]
    for option in ("device", "images", "batch", "steps"):
        command += [f"--{option}", str(getattr(settings, option))]
    done = subprocess.run(
        command, env={**os.environ, **variables}, capture_output=True, text=True, check=False
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    if not lines:
        print(f"{name} failed:\n{done.stderr[-2000:]}", file=sys.stderr)
        return None
    return json.loads(lines[-1].removeprefix(MARK))  # type: ignore[no-any-return]


def measure(settings: argparse.Namespace) -> None:
    """Train, and print the result on rank 0."""
    wrap, size, variables = CONTESTANTS[settings.contestant]
    if variables:
        hvd.init()
    is_gpu = settings.device == "cuda"
    device = torch.device("cuda", 0) if is_gpu else torch.device("cpu")
    if is_gpu:
        torch.cuda.set_device(device)
    layout = torch.channels_last
    model = resnet50().to(device).to(memory_format=layout)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = wrap(model, sgd)
    shape = (settings.batch, 3, settings.images, settings.images)
    images = torch.randn(shape, device=device).to(memory_format=layout)
    labels = torch.randint(1000, (settings.batch,), device=device)

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16):
            loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()

    def synchronize() -> None:
        if is_gpu:
            torch.cuda.synchronize(device)

    for _ in range(5 if is_gpu else 1):
        step()
    synchronize()
    begin = time.perf_counter()
    for _ in range(settings.steps):
        step()
    synchronize()
    seconds = time.perf_counter() - begin
    result = {
        "images": size * settings.batch * settings.steps / seconds,
        "waits": host_waits(step) if is_gpu else 0,
        "megabytes": torch.cuda.max_memory_allocated() / 1e6 if is_gpu else 0.0,
    }
    if os.environ["RANK"] == "0":
        print(MARK + json.dumps(result), flush=True)
    if not variables and dist.is_initialized():
        dist.destroy_process_group()


def host_waits(step: Step) -> int:
    """Return how often the host waits for the device in one step."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        step()
    # The profiler itself waits once at its end.
    return max(0, sum(event.name in WAITS for event in trace.events() or []) - 1)


if __name__ == "__main__":
    main()
