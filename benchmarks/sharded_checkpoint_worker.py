"""One process that trains a sharded model and saves it in one way. Writes what it costs into FOLDER/RANK.json.

python sharded_checkpoint_worker.py FOLDER WAY     # started by rounds.py
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from step_worker import peak_megabytes
from torch import nn
from torch.distributed.checkpoint import async_save, save
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard

import dualdist as hvd

WIDTH, LAYERS, ROWS = 2048, 12, 64
"""50 million parameters; with Adam's two moments, 604 MB."""
SAVES, STEPS = 3, 4
"""STEPS follow each save, so that one in the background has time to end."""

State = dict[str, Any]


class Way(NamedTuple):
    """A way to save."""

    begin: Callable[[], Any]
    """Begins to save; collective."""
    end: Callable[[Any], object]
    """Waits for the end of what `begin` has returned."""


def _by_torch(state: State, folder: Path, function: Callable[..., Any]) -> Way:
    group = dist.new_group(backend="gloo")

    def begin() -> Any:
        model, optimizer = get_state_dict(state["model"], state["optimizer"])
        values = {"model": model, "optimizer": optimizer}
        return function(values, checkpoint_id=folder / "torch", process_group=group)

    return Way(begin, lambda saving: saving.result() if hasattr(saving, "result") else None)


def _by_dualdist(state: State, folder: Path, asynchronous: bool) -> Way:
    manager = hvd.checkpoint.CheckpointManager(folder, state, keep=1, asynchronous=asynchronous, sharded=True)

    def begin() -> None:
        manager.step()
        manager.save()

    return Way(begin, lambda saving: manager.wait())


WAYS: dict[str, Callable[[State, Path], Way]] = {
    "no save": lambda state, folder: Way(lambda: None, lambda saving: None),
    "torch save": lambda state, folder: _by_torch(state, folder, save),
    "torch async_save": lambda state, folder: _by_torch(state, folder, async_save),
    "dualdist": lambda state, folder: _by_dualdist(state, folder, False),
    "dualdist asynchronous": lambda state, folder: _by_dualdist(state, folder, True),
}


def main() -> None:
    folder, name = Path(sys.argv[1]), sys.argv[2]
    hvd.init(backend="torch", transport="gloo")
    torch.set_num_threads(1)
    model: Any = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.Adam(model.parameters())
    batch = torch.randn(ROWS, WIDTH)

    def step() -> None:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    def window() -> tuple[float, float]:
        """Save, train, and return the seconds of the pause and of the slowest step."""
        hvd.barrier()
        began = time.perf_counter()
        saving = way.begin()
        pause = time.perf_counter() - began
        slowest = max(_seconds(step) for _ in range(STEPS))
        way.end(saving)
        return pause, slowest

    step()
    way = WAYS[name]({"model": model, "optimizer": optimizer}, folder)
    began, cpu_began = time.perf_counter(), time.process_time()
    pauses, slowest = zip(*(window() for _ in range(SAVES)), strict=True)
    figures = {
        "longest pause s": max(pauses),
        "slowest step s": max(slowest),
        "in all s": time.perf_counter() - began,
        "CPU s": time.process_time() - cpu_began,
        "peak MB": peak_megabytes(),
    }
    (folder / f"{hvd.rank()}.json").write_text(json.dumps(figures))
    hvd.shutdown()


def _seconds(function: Callable[[], None]) -> float:
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
