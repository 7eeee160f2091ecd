"""Measures one training step: dualdist in both styles, DDP and Horovod, in turns in the processes of your launcher.

    torchrun --nproc-per-node 2 benchmarks/step_in_world.py --peers DDP
    horovodrun --gloo -np 2 python benchmarks/step_in_world.py
    horovodrun --gloo -np 2 python benchmarks/step_in_world.py --backend horovod
    horovodrun --gloo -np 2 python benchmarks/step_in_world.py --hook allreduce    # DDP and dualdist with this hook
    mpirun -np 2 python benchmarks/step_in_world.py --transport mpi
    dualdist run -H host1:2,host2:2 python benchmarks/step_in_world.py --peers DDP --models mlp

Times are medians over the steps of rank 0. A ratio is the median over the rounds, then the quartiles. The turns that
it compares are seconds apart, so a machine whose speed changes from minute to minute has little effect on it. CPU
time (user and system, all threads of rank 0) depends less on what else the machine does, and the bytes that rank 0's
host sends to other hosts (all interfaces but the loopback) do not depend on it at all. Each round has its own random
order, because a step is slower after some contestants than after others. Each contestant has several models, because
the steps of equal models in one process differ by up to 20 %, depending on where their memory is. All contestants
gain from the limits of malloc that dualdist raises (core/gradients/buckets.py), so with ResNets the ratios
are higher than those of step.py. Needs real Horovod, unless --peers leaves it out.
"""

from __future__ import annotations

import importlib
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from hooks import HOOKS
from models import MODELS
from report_file import write_report
from torch import nn
from world import command_line, join_world, start_gloo

import dualdist as hvd

Step = Callable[[], None]


_COPIES = {"mlp": 2, "resnet50": 2}
"""How many models each contestant has, where memory is short; others have 3."""
_WARM_UP_STEPS = 12
"""A model of dualdist that is made after another one sends during backward from its eleventh backward on."""


def main() -> None:
    parser = command_line("Measure what one training step costs.", rounds=8)
    parser.add_argument("--hook", choices=tuple(HOOKS), default="none", help="a communication hook (%(default)s)")
    parser.add_argument(
        "--models", nargs="+", choices=tuple(MODELS), default=["cnn", "mlp", "small"], help="(%(default)s)"
    )
    parser.add_argument("--copies", type=int, help="models of each contestant, if memory is short (2 or 3)")
    parser.add_argument("--peers", nargs="+", choices=("DDP", "Horovod"), default=["DDP", "Horovod"], help="(both)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures, by model and contestant")
    settings = join_world(parser)
    horovod = importlib.import_module("horovod.torch") if "Horovod" in settings.peers else None
    if horovod is not None:
        horovod.init()
    gloo = start_gloo() if "DDP" in settings.peers else None
    measured = {}
    if hvd.rank() == 0:
        print(f"dualdist on {hvd.backend_name()} ({hvd.transport_name()}), {hvd.size()} processes; ms per step")
    for name in settings.models:
        torch.manual_seed(0)
        steps: list[tuple[str, Step]] = []
        number: int = settings.copies or _COPIES.get(name, 3)
        for style, wrap in number * list(styles(gloo, HOOKS[settings.hook], horovod).items()):
            model, batch = MODELS[name].make()
            steps.append((style, step_of(*wrap(model), batch)))
        turn = max(2, MODELS[name].steps // 10)  # about 0.2 s of one process
        measured[name] = compare(name, steps, settings.rounds, turn)
        if hvd.rank() == 0 and settings.json is not None:
            write_report(settings.json, {"models": measured})
    hvd.shutdown()


def styles(
    gloo: Any, hook: Any, horovod: Any
) -> dict[str, Callable[[nn.Module], tuple[nn.Module, torch.optim.Optimizer]]]:
    """Return contestant -> function that wraps a model and creates its optimizer.

    Args:
        gloo: DDP's group; None leaves DDP out.
        hook: a communication hook for all but Horovod, which has none.
        horovod: horovod.torch; None leaves Horovod out.
    """

    def sgd(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)

    def ddp(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
        wrapped = nn.parallel.DistributedDataParallel(model, process_group=gloo, gradient_as_bucket_view=True)
        if hook is not None:
            wrapped.register_comm_hook(gloo, hook)
        return wrapped, sgd(wrapped)

    def ours(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
        wrapped = hvd.DistributedDataParallel(model)
        if hook is not None:
            wrapped.register_comm_hook(None, hook)
        return wrapped, sgd(wrapped)

    raw = {
        "Horovod": lambda model: (
            model,
            horovod.DistributedOptimizer(sgd(model), named_parameters=model.named_parameters()),
        )
    }
    return {
        **({"DDP": ddp} if gloo is not None else {}),
        **(raw if horovod is not None else {}),
        "optimizer": lambda model: (
            model,
            hvd.DistributedOptimizer(sgd(model), named_parameters=model.named_parameters(), comm_hook=hook),
        ),
        "module": ours,
    }


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> Step:
    def step() -> None:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    return step


def compare(name: str, steps: list[tuple[str, Step]], rounds: int, turn: int) -> dict[str, dict[str, list[float]]]:
    """Print the median step of each contestant, and the ratios of ours to the others'. Return rank 0's figures.

    They are one number for each round: contestant -> "ms", "CPU ms" and "MB", which its host sends to other hosts.
    """
    ms: dict[str, list[float]] = {style: [] for style, _ in steps}  # the median of each round
    cpu_ms: dict[str, list[float]] = {style: [] for style in ms}
    sent_mb: dict[str, list[float]] = {style: [] for style in ms}
    order, shuffler = list(steps), random.Random(0)  # the same on all ranks
    for number in range(rounds + 1):
        shuffler.shuffle(order)
        taken: dict[str, list[float]] = {style: [] for style in ms}
        busy: dict[str, list[float]] = {style: [] for style in ms}
        for style, step in order:
            hvd.barrier()
            sent_before = sent_bytes()
            cpu_began = time.process_time()
            for _ in range(turn if number > 0 else max(turn, _WARM_UP_STEPS)):
                began = time.perf_counter()
                step()
                taken[style].append(1e3 * (time.perf_counter() - began))
            busy[style].append(1e3 * (time.process_time() - cpu_began) / turn)
            hvd.barrier()
            sent_mb[style].append((sent_bytes() - sent_before) / turn / 1e6)
        if number > 0:  # the first round is the warm-up
            for style in ms:
                ms[style].append(statistics.median(taken[style]))
                cpu_ms[style].append(statistics.median(busy[style]))
    measured = {style: {"ms": ms[style], "CPU ms": cpu_ms[style], "MB": sent_mb[style][1:]} for style in ms}
    if hvd.rank() != 0:
        return measured
    for kind, times in (("", ms), (", CPU time", cpu_ms)):
        medians = (f"{style} {statistics.median(values):.2f}" for style, values in times.items())
        print(f"{name}{kind}: {', '.join(medians)}")
        for style in ("optimizer", "module"):
            peers = [peer for peer in times if peer not in ("optimizer", "module")]
            ratios = [f"{ratios_of(times[style], times[peer])} x {peer}" for peer in peers]
            print(f"    dualdist's {style} style: {', '.join(ratios)}")
    if any(sum(values) for values in sent_mb.values()):
        medians = (f"{style} {statistics.median(values):.1f}" for style, values in sent_mb.items())
        print(f"{name}, MB per step to other hosts: {', '.join(medians)}")
    return measured


def sent_bytes() -> int:
    """Return how many bytes this host has sent on all interfaces but the loopback."""
    lines = Path("/proc/net/dev").read_text().splitlines()[2:]
    counts = (line.replace(":", " ").split() for line in lines)
    return sum(int(fields[9]) for fields in counts if fields[0] != "lo")


def ratios_of(ours: list[float], theirs: list[float]) -> str:
    """Return the median over the rounds, and the quartiles."""
    ratios = [mine / yours for mine, yours in zip(ours, theirs, strict=True)]
    if len(ratios) == 1:
        return f"{ratios[0]:.2f}"
    least, median, greatest = statistics.quantiles(ratios, n=4, method="inclusive")
    return f"{median:.2f} ({least:.2f}-{greatest:.2f})"


if __name__ == "__main__":
    main()
