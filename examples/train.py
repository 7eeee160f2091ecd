"""Train an image classifier with dualdist: one script for every launcher and both backends.

    python examples/train.py                                                       # a single process
    torchrun --standalone --nproc-per-node 2 examples/train.py
    horovodrun -np 2 python examples/train.py
    mpirun -np 2 python examples/train.py
    torchrun --standalone --nproc-per-node 2 examples/train.py --backend horovod   # any launcher, any backend

The default data set is scikit-learn's handwritten digits: no download, and seconds of training on a CPU.
Other data, other models, and what to save of a run:

    python examples/train.py --data cifar10 --data-dir ~/data --model resnet18 --epochs 30
    python examples/train.py --style ddp --amp bf16 --sync-bn --accumulate 2 --clip-norm 1 --ema 0.9 --tta --compile
    python examples/train.py --metrics run.json --plot run.png --log-dir runs/first
    python examples/train.py --checkpoint-dir runs/first     # run it again: it resumes, also in mid-epoch

It resumes with any number of processes. Choose --batch-size so that the number of images per step stays the same.
Data sets and models are in data.py. Needs `pip install 'dualdist[examples]'`.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import itertools
import math
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import torch
from data import DATA, IN_DATA_DIR, Data, build_model, model_name
from report import Report, log
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader
from tqdm import tqdm

import dualdist as hvd

AMP = {"off": None, "fp16": torch.float16, "bf16": torch.bfloat16}


def read_settings() -> argparse.Namespace:
    parser = OneLineParser(description="Train an image classifier under any launcher, on any backend.")
    add = parser.add_argument
    add("--data", choices=DATA, default="digits", help="what to learn (%(default)s)")
    add("--data-dir", type=Path, metavar="FOLDER", help="folder of the data; not for digits and fake")
    add("--model", type=model_name, default="cnn", help="cnn or a torchvision model (%(default)s)")
    add("--epochs", type=number(int, 1), default=12, help="passes over the training images (%(default)s)")
    add("--batch-size", type=number(int, 1), default=32, help="images per batch and process (%(default)s)")
    add("--lr", type=number(float, 0), default=0.05, help="learning rate after the warm-up (%(default)s)")
    add("--momentum", type=number(float, 0), default=0.9, help="of SGD (%(default)s)")
    add("--weight-decay", type=number(float, 0), default=5e-4, help="not for norms and biases (%(default)s)")
    add("--warmup-epochs", type=number(int, 0), default=1, help="linear, before the cosine (%(default)s)")
    add("--scale-lr", choices=("none", "sqrt", "linear"), default="none", help="with the batch (%(default)s)")
    add("--style", choices=("optimizer", "ddp"), default="optimizer", help="what is wrapped (%(default)s)")
    add("--amp", choices=AMP, default="off", help="mixed precision in training (%(default)s)")
    add("--sync-bn", action="store_true", help="batch norm over the batches of all processes")
    add("--accumulate", type=number(int, 1), default=1, metavar="N", help="batches per step (%(default)s)")
    add("--clip-norm", type=number(float, 0), default=0, metavar="X", help="of all gradients; 0: do not")
    add("--ema", type=number(float, 0, 1), default=0, metavar="DECAY", help="average the weights; 0: do not")
    add("--tta", action="store_true", help="validate on images seen in several ways (mirrored or shifted)")
    add("--compile", action="store_true", help="train with torch.compile")
    add("--threads", type=number(int, 1, 1025), default=1, help="CPU threads per process (%(default)s)")
    add("--seed", type=number(int, 0, 2**31), default=0, help="of the weights and the order (%(default)s)")
    add("--backend", help="torch, horovod or local (chosen from the launcher)")
    add("--transport", help="such as nccl, gloo or mpi (chosen from the launcher and the devices)")
    add("--metrics", type=Path, metavar="FILE", help="write the results as one JSON object")
    add("--plot", type=Path, metavar="FILE.png", help="draw loss and accuracy per epoch (needs matplotlib)")
    add("--log-dir", type=Path, metavar="FOLDER", help="write TensorBoard scalars (needs tensorboard)")
    add("--checkpoint-dir", type=Path, metavar="FOLDER", help="save checkpoints there, and resume from them")
    add(
        "--save-every",
        type=number(int, 1),
        default=100,
        metavar="N",
        help="steps between saves (%(default)s)",
    )
    add("--resume", default="auto", metavar="auto|never|PATH", help="what to resume from (%(default)s)")
    settings = parser.parse_args()
    if settings.warmup_epochs > settings.epochs:
        parser.error(f"--warmup-epochs must be at most --epochs, but is {settings.warmup_epochs} instead.")
    if settings.resume != "auto" and settings.checkpoint_dir is None:
        parser.error(f"--resume must be with --checkpoint-dir, but is {settings.resume} without it.")
    compiler = os.environ.get("CXX", "g++")
    if settings.compile and not (torch.cuda.is_available() or shutil.which(compiler)):
        parser.error(f"--compile must be where a C++ compiler is, but {compiler} is not found.")
    return settings


def train(settings: argparse.Namespace) -> None:
    device, data = hvd.device(), load_data(settings)
    sampler = hvd.DistributedSampler(data.train, seed=settings.seed, drop_last=True)
    batch_size = min(settings.batch_size, len(sampler))
    if batch_size == 0:
        fail(f"--data must hold an image per process, but has {len(data.train)}. Start fewer processes.")
    # The loader has its own generator. Otherwise a resumed run would draw other numbers for dropout.
    own = torch.Generator()
    loader = DataLoader(data.train, batch_size, sampler=sampler, drop_last=True, generator=own)
    if settings.accumulate > len(loader):
        fail(f"--accumulate must be at most {len(loader)}, an epoch's batches, but is {settings.accumulate}.")
    steps_per_epoch = math.ceil(len(loader) / settings.accumulate)

    # Each rank draws its own dropout; the weights become equal below.
    hvd.seed_everything(settings.seed, rank_offset=True)
    model = build_model(settings.model, data).to(device)
    if settings.sync_bn:
        if not any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in model.modules()):
            fail(f"--sync-bn must be for a model with batch norm, but {settings.model} has none.")
        model = hvd.SyncBatchNorm.convert_sync_batchnorm(model)
    network: Any = torch.compile(model) if settings.compile else model  # both have the same weights
    optimizer = build_optimizer(model, settings)
    if settings.style == "ddp":
        network = hvd.DistributedDataParallel(network)
    else:
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    scheduler = build_scheduler(optimizer, settings, steps_per_epoch)
    autocast = torch.autocast(device.type, AMP[settings.amp], enabled=settings.amp != "off")
    scaler = torch.amp.GradScaler(device.type, enabled=settings.amp == "fp16")
    averaging = get_ema_multi_avg_fn(settings.ema)
    ema = AveragedModel(model, multi_avg_fn=averaging, use_buffers=True) if settings.ema else None

    report = Report(settings, steps_per_epoch, images_per_step=batch_size * hvd.size() * settings.accumulate)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler}
    state |= {"sampler": sampler, "epochs": report.epochs, "images_per_step": report.images_per_step}
    state |= {"ema": ema} if ema else {}
    manager = open_checkpoints(settings, state)
    report.epochs = state["epochs"]
    for epoch in range(len(report.epochs), settings.epochs):
        sampler.set_epoch(epoch)  # in a resumed epoch, `loader` yields only the rest
        report.start_epoch(len(loader) * batch_size * hvd.size())
        network.train()
        train_loss = hvd.metrics.Mean()
        bar = tqdm(loader, f"epoch {epoch + 1}", leave=False, disable=report.hides_bar)
        for batches in windows(bar, settings.accumulate):
            optimizer.zero_grad()
            if isinstance(optimizer, hvd.SynchronizedOptimizer):  # the last window of an epoch may be shorter
                optimizer.set_backward_passes_per_step(len(batches))
            for number, (images, labels) in enumerate(batches, 1):
                accumulates = settings.style == "ddp" and number < len(batches)
                with network.no_sync() if accumulates else contextlib.nullcontext():
                    with autocast:
                        loss = F.cross_entropy(network(images.to(device)), labels.to(device))
                    scaler.scale(loss / len(batches)).backward()
                train_loss.update(loss, len(labels))
                sampler.advance(len(labels))
            if settings.clip_norm:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), settings.clip_norm)
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            if ema:
                ema.update_parameters(model)
            if manager:
                manager.step()
        results = {"train_loss": train_loss.compute().item()}
        results |= evaluate(model, data, batch_size, settings.tta)
        if ema:
            averaged = evaluate(ema, data, batch_size, settings.tta)
            results |= {name.replace("val", "ema"): value for name, value in averaged.items()}
        report.add_epoch(results)
        if manager:
            manager.save({"val_accuracy": results["val_accuracy"]})
    report.finish()


def windows(batches: Iterable[Any], size: int) -> Iterator[list[Any]]:
    """Yield lists of `size` batches; the last list may be shorter."""
    batches = iter(batches)
    while window := list(itertools.islice(batches, size)):
        yield window


def open_checkpoints(
    settings: argparse.Namespace, state: dict[str, Any]
) -> hvd.checkpoint.CheckpointManager | None:
    """Return the manager, after it has resumed as --resume says; None without --checkpoint-dir. Collective."""
    if settings.checkpoint_dir is None:
        return None
    images_per_step = state["images_per_step"]
    try:
        manager = hvd.checkpoint.CheckpointManager(
            settings.checkpoint_dir, state, every_steps=settings.save_every, best=("val_accuracy", "max")
        )
        if settings.resume == "auto":
            manager.restore_latest()
        elif settings.resume != "never":
            manager.restore(settings.resume)
    except hvd.CheckpointError as error:
        fail(str(error))
    if manager.steps:
        log(f"resuming after step {manager.steps}")
    if state["images_per_step"] != images_per_step:
        saved = state["images_per_step"]
        log(f"the schedule is for {saved} images per step, not for {images_per_step}: see --batch-size")
    return manager


@torch.no_grad()
def evaluate(model: nn.Module, data: Data, batch_size: int, tta: bool) -> dict[str, float]:
    """Return the mean loss and the accuracy over all validation images, on every rank.

    Collective. Exactly one rank evaluates each image; a rank may have none. tta: average the outputs over all views.
    """
    # Batch-norm statistics differ between ranks. All ranks evaluate with those of rank 0.
    hvd.broadcast_parameters(dict(model.named_buffers()), root_rank=0)
    model.eval()
    mean_loss, matrix = hvd.metrics.Mean(), hvd.metrics.ConfusionMatrix(data.num_classes)
    sampler = hvd.DistributedSampler(data.val, shuffle=False, pad=False)
    for images, labels in DataLoader(data.val, batch_size, sampler=sampler):
        images, labels = images.to(hvd.device()), labels.to(hvd.device())
        views = data.views(images) if tta else [images]
        outputs = torch.stack([model(view).double() for view in views]).mean(dim=0)
        mean_loss.update(F.cross_entropy(outputs, labels, reduction="none"))
        matrix.update(outputs.argmax(dim=1), labels)
    loss, confusion = hvd.metrics.compute({"loss": mean_loss, "confusion": matrix}).values()
    correct, all_images = confusion.trace().item(), confusion.sum().item()
    return {"val_loss": loss.item(), "val_accuracy": correct / all_images}


def load_data(settings: argparse.Namespace) -> Data:
    """Return the data. If one rank cannot read its copy, all ranks exit. Collective."""
    problem = ""
    try:
        data = DATA[settings.data](settings.data_dir)
    except (OSError, RuntimeError) as error:
        problem = " ".join(str(error).split()).partition(". ")[0]
    if hvd.allreduce(torch.tensor([float(problem != "")], device=hvd.device()), op=hvd.Sum).item():
        problem = problem or "another host has no copy"
        fail(f"--data-dir must hold {IN_DATA_DIR[settings.data]}; {settings.data_dir} does not: {problem}.")
    return data


def build_optimizer(model: nn.Module, settings: argparse.Namespace) -> torch.optim.Optimizer:
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": settings.weight_decay},
        {"params": [p for p in model.parameters() if p.ndim <= 1], "weight_decay": 0.0},  # norms, biases
    ]
    lr, factor = settings.lr, settings.accumulate * hvd.size()
    if settings.scale_lr != "none":
        lr = hvd.lr.scaled(lr, factor, rule=settings.scale_lr)
    return torch.optim.SGD(groups, lr=lr, momentum=settings.momentum)


def build_scheduler(
    optimizer: torch.optim.Optimizer, settings: argparse.Namespace, steps: int
) -> LRScheduler:
    """Return a linear warm-up and then a cosine to zero. steps: in each epoch."""
    warmup = settings.warmup_epochs * steps
    cosine = CosineAnnealingLR(optimizer, T_max=max(1, settings.epochs * steps - warmup))
    return hvd.lr.warmup(optimizer, warmup, factor=max(1, warmup), then=cosine)


def fail(message: str) -> NoReturn:
    """Print one line and exit with code 2. If several ranks fail, only rank 0 prints its line."""
    rank = 0
    with contextlib.suppress(hvd.ConfigurationError):
        rank = hvd.launch_info().rank
    if rank != 0:
        time.sleep(10)  # launchers kill all ranks when one fails: let rank 0 print its line first
    print(f"train.py: error: {message}\n", end="", file=sys.stderr, flush=True)
    sys.exit(2)


class OneLineParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        fail(f"{message.removeprefix('argument ')} (see --help)")


def number(kind: type[int] | type[float], lowest: int, limit: float = math.inf) -> Callable[[str], float]:
    """Return a parser for numbers of at least `lowest` and less than `limit`."""

    def read(text: str) -> float:
        with contextlib.suppress(ValueError):
            if lowest <= kind(text) < limit:
                return kind(text)
        rule = f"a {'whole ' if kind is int else ''}number of at least {lowest}"
        rule += f" and less than {limit}" if limit < math.inf else ""
        raise argparse.ArgumentTypeError(f"must be {rule}, but is {text} instead.")

    return read


def check_paths(settings: argparse.Namespace) -> None:
    """Exit with one line if a file or folder cannot be used, before any backend starts."""
    launch = hvd.launch_info()
    if launch.local_rank not in (None, launch.rank):
        return  # another host than rank 0's: no file is written there, and load_data checks the data
    folder, contents = settings.data_dir, IN_DATA_DIR.get(settings.data)
    if contents and not (folder and folder.is_dir()):
        fail(f"--data-dir must be an existing folder for {contents}; it is {folder or 'not given'}.")
    if settings.plot and not (settings.plot.suffix == ".png" and importlib.util.find_spec("matplotlib")):
        fail(f"--plot must be a .png file, with matplotlib installed, but is {settings.plot} instead.")
    outputs = {"--metrics": settings.metrics, "--plot": settings.plot, "--log-dir": settings.log_dir}
    for option, path in outputs.items():
        if path:
            check_output(option, path, is_folder=option == "--log-dir")


def check_output(option: str, path: Path, *, is_folder: bool) -> None:
    try:
        if is_folder:
            path.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path if is_folder else path.parent).close()
    except OSError as error:
        fail(f"{option} must be where files can be written, but is {path} instead: {error.strerror}.")
    if path.is_dir() and not is_folder:
        fail(f"{option} must be a file, but is the folder {path} instead.")


def main() -> None:
    settings = read_settings()
    torch.set_num_threads(settings.threads)  # the same numbers under every launcher
    torch.backends.cudnn.deterministic = True
    try:
        check_paths(settings)
        hvd.init(backend=settings.backend, transport=settings.transport)
    except hvd.WorldMismatchError:
        raise  # on every rank, as there may be several ranks 0
    except hvd.ConfigurationError as error:
        fail(str(error))
    train(settings)
    hvd.shutdown()


if __name__ == "__main__":
    main()
