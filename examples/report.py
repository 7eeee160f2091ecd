"""What examples/train.py prints and saves about a run."""

from __future__ import annotations

import argparse
import importlib.util
import json
import time
from pathlib import Path
from typing import Any

import dualdist as hvd


class Report:
    """Progress bar, log lines, TensorBoard scalars, JSON and plot; rank 0 alone writes them."""

    def __init__(self, settings: argparse.Namespace, steps_per_epoch: int, images_per_step: int) -> None:
        self.settings, self.steps_per_epoch, self.images_per_step = settings, steps_per_epoch, images_per_step
        self.started = time.perf_counter()
        self.epochs: list[dict[str, float]] = []
        self.hides_bar = None if hvd.rank() == 0 else True  # None: hidden unless the output is a terminal
        self.writer: Any = None
        log(f"{settings.model} on {settings.data}: {steps_per_epoch} steps of {images_per_step} images")
        if settings.log_dir and not importlib.util.find_spec("tensorboard"):
            log("--log-dir is ignored: tensorboard is not installed. pip install tensorboard")
        elif settings.log_dir and hvd.rank() == 0:
            from torch.utils.tensorboard import SummaryWriter

            self.writer = SummaryWriter(settings.log_dir)

    def start_epoch(self, images: int) -> None:
        """images: the number of training images in this epoch, over all ranks."""
        self.epoch_started, self.images = time.perf_counter(), images

    def add_epoch(self, results: dict[str, float]) -> None:
        """results: name -> loss or accuracy."""
        seconds = time.perf_counter() - self.epoch_started
        rate = self.images / seconds
        self.epochs.append({**results, "seconds": seconds, "samples_per_second": rate})
        losses = f"training loss {results['train_loss']:.4f}, validation loss {results['val_loss']:.4f}"
        accuracies = f"accuracy {results['val_accuracy']:.4f}"
        if "ema_accuracy" in results:
            accuracies += f" ({results['ema_accuracy']:.4f} with averaged weights)"
        log(f"epoch {len(self.epochs)}: {losses}, {accuracies}, {rate:,.0f} images/s")
        if self.writer:
            for name, value in self.epochs[-1].items():
                self.writer.add_scalar(name, value, len(self.epochs))

    def finish(self) -> None:
        """Write the files and print the last line."""
        world = {
            "backend": hvd.backend_name(),
            "transport": hvd.transport_name(),
            "launcher": hvd.launcher_name(),
            "world_size": hvd.size(),
        }
        accuracy, steps = self.epochs[-1]["val_accuracy"], len(self.epochs) * self.steps_per_epoch
        if self.writer:
            self.writer.close()
        if self.settings.metrics and hvd.rank() == 0:
            metrics = {**world, "steps": steps, "epochs": self.epochs, "val_accuracy": accuracy}
            self.settings.metrics.write_text(json.dumps(metrics, indent=2) + "\n")
        if self.settings.plot and hvd.rank() == 0:
            plot(self.epochs, self.settings.plot)
        where = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in world.items())
        log(f"validation accuracy {accuracy:.4f} after {time.perf_counter() - self.started:.1f} s ({where})")


def log(message: str) -> None:
    if hvd.rank() == 0:
        print(message + "\n", end="", flush=True)  # one write, as launchers put a prefix before each


def plot(epochs: list[dict[str, float]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.5), layout="constrained")
    for axes, kind in zip(figure.subplots(1, 2), ("loss", "accuracy"), strict=True):
        for name in [name for name in epochs[0] if name.endswith(kind)]:
            axes.plot(range(1, len(epochs) + 1), [epoch[name] for epoch in epochs], marker=".", label=name)
        axes.locator_params(axis="x", integer=True)
        axes.set_xlabel("epoch")
        axes.legend()
    figure.savefig(path, dpi=150)
