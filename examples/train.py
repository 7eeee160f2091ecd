"""Train an image classifier with dualdist: one script for every launcher and both backends.

    python examples/train.py                                                       # a single process
    torchrun --standalone --nproc-per-node 2 examples/train.py
    horovodrun -np 2 python examples/train.py
    mpirun -np 2 python examples/train.py
    torchrun --standalone --nproc-per-node 2 examples/train.py --backend horovod   # any launcher, any backend

The default data, scikit-learn's handwritten digits, needs no download. Other data and models, and what to save:

    python examples/train.py --data cifar10 --data-dir ~/data --model resnet18 --epochs 30
    python examples/train.py --style ddp --amp bf16 --sync-bn --accumulate 2 --clip-norm 1 --ema 0.9 --tta --compile
    python examples/train.py --metrics run.json --plot run.png --log-dir runs/first
    python examples/train.py --checkpoint-dir runs/first     # run it again: it resumes, also in mid-epoch

It resumes with any number of processes. Choose --batch-size so that the number of images per step stays the same.
Data sets and models are in data.py. Needs `pip install '.[examples]'`.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from data import DATA, IN_DATA_DIR, Data, build_model, model_name
from report import Report, log
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader

import dualdist as hvd
from dualdist.checkpoint import CheckpointManager

AMP = {"off": None, "fp16": torch.float16, "bf16": torch.bfloat16}


def build_parser() -> argparse.ArgumentParser:
    keep_lines = argparse.RawDescriptionHelpFormatter  # without `usage`, errors have one line
    parser = argparse.ArgumentParser(usage=argparse.SUPPRESS, description=__doc__, formatter_class=keep_lines)
    add = parser.add_argument
    add("--data", choices=DATA, default="digits", help="what to learn (%(default)s)")
    add("--data-dir", type=Path, metavar="FOLDER", help="folder of the data; not for digits and fake")
    add("--model", type=model_name, default="cnn", help="cnn or a torchvision model (%(default)s)")
    add("--epochs", type=positive, default=12, help="passes over the training images (%(default)s)")
    add("--batch-size", type=positive, default=32, help="images per batch and process (%(default)s)")
    add("--lr", type=float, default=0.05, help="learning rate after the warm-up (%(default)s)")
    add("--momentum", type=float, default=0.9, help="of SGD (%(default)s)")
    add("--weight-decay", type=float, default=5e-4, help="not for norms and biases (%(default)s)")
    add("--warmup-epochs", type=int, default=1, help="linear, before the cosine (%(default)s)")
    add("--scale-lr", choices=("none", "sqrt", "linear"), default="none", help="with the batch (%(default)s)")
    add("--style", choices=("optimizer", "ddp"), default="optimizer", help="what is wrapped (%(default)s)")
    add("--amp", choices=AMP, default="off", help="mixed precision in training (%(default)s)")
    add("--sync-bn", action="store_true", help="batch norm over the batches of all processes")
    add("--accumulate", type=positive, default=1, metavar="N", help="batches per step (%(default)s)")
    add("--clip-norm", type=float, default=0, metavar="X", help="of all gradients; 0: do not")
    add("--ema", type=float, default=0, metavar="DECAY", help="average the weights; 0: do not")
    add("--tta", action="store_true", help="validate on images seen in several ways (mirrored or shifted)")
    add("--compile", action="store_true", help="train with torch.compile")
    add("--threads", type=positive, default=1, help="CPU threads per process (%(default)s)")
    add("--seed", type=int, default=0, help="of the weights and the order (%(default)s)")
    add("--backend", help="torch, horovod or local (chosen from the launcher)")
    add("--transport", help="such as nccl, gloo or mpi (chosen from the launcher and the devices)")
    add("--metrics", type=Path, metavar="FILE", help="write the results as one JSON object")
    add("--plot", type=Path, metavar="FILE.png", help="draw loss and accuracy per epoch (needs matplotlib)")
    add("--log-dir", type=Path, metavar="FOLDER", help="write TensorBoard scalars (needs tensorboard)")
    add("--checkpoint-dir", type=Path, metavar="FOLDER", help="save checkpoints there, and resume from them")
    add("--save-every", type=positive, default=100, metavar="N", help="steps between saves (%(default)s)")
    add("--resume", default="auto", metavar="auto|never|PATH", help="what to resume from (%(default)s)")
    return parser


def positive(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, but is {text} instead.")
    return number


def train(settings: argparse.Namespace) -> None:
    from tqdm import tqdm  # here, so that --help works without it

    device, data = hvd.device(), DATA[settings.data](settings.data_dir)
    sampler = hvd.DistributedSampler(data.train, seed=settings.seed, drop_last=True)
    batch_size = min(settings.batch_size, len(sampler))
    # The loader has its own generator. Otherwise a resumed run would draw other numbers for dropout.
    loader = DataLoader(data.train, batch_size, sampler=sampler, drop_last=True, generator=torch.Generator())
    steps_per_epoch = math.ceil(len(loader) / settings.accumulate)

    hvd.seed_everything(settings.seed, rank_offset=True)  # each rank draws its own dropout
    model = build_model(settings.model, data).to(device)
    if settings.sync_bn:
        model = hvd.SyncBatchNorm.convert_sync_batchnorm(model)
    network: Any = torch.compile(model) if settings.compile else model  # both have the same weights
    optimizer: Any = build_optimizer(model, settings)
    wrapper: Any
    if settings.style == "ddp":
        network = wrapper = hvd.DistributedDataParallel(network)
    else:
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        optimizer = wrapper = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    warmup = settings.warmup_epochs * steps_per_epoch  # linear; then a cosine to zero
    cosine = CosineAnnealingLR(optimizer, T_max=max(1, settings.epochs * steps_per_epoch - warmup))
    scheduler = hvd.lr.warmup(optimizer, warmup, factor=max(1, warmup), then=cosine)
    autocast = torch.autocast(device.type, AMP[settings.amp], enabled=settings.amp != "off")
    scaler = torch.amp.GradScaler(device.type, enabled=settings.amp == "fp16")
    averaging = get_ema_multi_avg_fn(settings.ema)
    ema = AveragedModel(model, multi_avg_fn=averaging, use_buffers=True) if settings.ema else None

    report = Report(settings, steps_per_epoch, images_per_step=batch_size * hvd.size() * settings.accumulate)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler}
    state |= {"sampler": sampler, "epochs": report.epochs} | ({"ema": ema} if ema else {})
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
            for number, (images, labels) in enumerate(batches, 1):
                with wrapper.no_sync() if number < len(batches) else contextlib.nullcontext():
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


def open_checkpoints(settings: argparse.Namespace, state: dict[str, Any]) -> CheckpointManager | None:
    """Return the manager, after it has resumed as --resume says; None without --checkpoint-dir. Collective."""
    if (folder := settings.checkpoint_dir) is None:
        return None
    manager = CheckpointManager(folder, state, every_steps=settings.save_every, best=("val_accuracy", "max"))
    if settings.resume == "auto":
        manager.restore_latest()
    elif settings.resume != "never":
        manager.restore(settings.resume)
    if manager.steps:
        log(f"resuming after step {manager.steps}")
    return manager


@torch.no_grad()
def evaluate(model: nn.Module, data: Data, batch_size: int, tta: bool) -> dict[str, float]:
    """Return loss and accuracy over all validation images. Collective: exactly one rank evaluates each image."""
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
    accuracy = confusion.trace().item() / confusion.sum().item()
    return {"val_loss": loss.item(), "val_accuracy": accuracy}


def build_optimizer(model: nn.Module, settings: argparse.Namespace) -> torch.optim.Optimizer:
    decayed = [param for param in model.parameters() if param.ndim > 1]
    others = [param for param in model.parameters() if param.ndim <= 1]  # norms and biases
    groups = [{"params": decayed, "weight_decay": settings.weight_decay}, {"params": others}]
    lr = settings.lr
    if settings.scale_lr != "none":
        lr = hvd.lr.scaled(lr, settings.accumulate * hvd.size(), rule=settings.scale_lr)
    return torch.optim.SGD(groups, lr=lr, momentum=settings.momentum)


def main() -> None:
    parser = build_parser()
    settings = parser.parse_args()
    contents, folder = IN_DATA_DIR.get(settings.data), settings.data_dir
    if contents and not (folder and folder.is_dir()):
        parser.error(f"--data-dir must be a folder for {contents}, but is {folder} instead.")
    torch.set_num_threads(settings.threads)  # the same numbers under every launcher
    try:
        hvd.init(backend=settings.backend, transport=settings.transport)
    except hvd.ConfigurationError as error:
        parser.error(str(error))
    train(settings)


if __name__ == "__main__":
    main()
