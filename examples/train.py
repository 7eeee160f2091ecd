"""Train an image classifier with dualdist: one file for every launcher and for both backends.

    python examples/train.py                                                       # a single process
    torchrun --standalone --nproc-per-node 2 examples/train.py
    horovodrun -np 2 python examples/train.py
    mpirun -np 2 python examples/train.py
    torchrun --standalone --nproc-per-node 2 examples/train.py --backend horovod   # any launcher, any backend

The default data are scikit-learn's handwritten digits: no download, and seconds of training on a CPU.
Other data, other models, and what to keep of a run:

    python examples/train.py --data cifar10 --data-dir ~/data --model resnet18 --epochs 30
    python examples/train.py --metrics run.json --plot run.png --log-dir runs/first
    python examples/train.py --checkpoint-dir runs/first     # once more, with any number of processes: it goes on

Needs `pip install 'dualdist[examples]'`.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.util
import itertools
import json
import math
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, LRScheduler, SequentialLR
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset
from torchvision import datasets, models
from torchvision.transforms import v2 as transforms
from tqdm import tqdm

import dualdist as hvd


def read_settings() -> argparse.Namespace:
    parser = OneLineParser(description="Train an image classifier under any launcher, on any backend.")
    add = parser.add_argument
    add("--data", choices=DATA, default="digits", help="what to learn (%(default)s)")
    add("--data-dir", type=Path, metavar="FOLDER", help="where the data are; not for digits and fake")
    add("--model", type=model_name, default="cnn", help="cnn or a torchvision model (%(default)s)")
    add("--epochs", type=number(int, 1), default=12, help="passes over the training images (%(default)s)")
    add("--batch-size", type=number(int, 1), default=32, help="images per step and process (%(default)s)")
    add("--lr", type=number(float, 0), default=0.05, help="learning rate after the warm-up (%(default)s)")
    add("--momentum", type=number(float, 0), default=0.9, help="of SGD (%(default)s)")
    add("--weight-decay", type=number(float, 0), default=5e-4, help="not for norms and biases (%(default)s)")
    add("--warmup-epochs", type=number(int, 0), default=1, help="linear, before the cosine (%(default)s)")
    add("--scale-lr", choices=SCALE_LR, default="none", help="how --lr grows with the world (%(default)s)")
    add("--threads", type=number(int, 1, 1025), default=1, help="CPU threads per process (%(default)s)")
    add("--seed", type=number(int, 0, 2**32), default=0, help="of the weights and the order (%(default)s)")
    add("--backend", help="torch, horovod or local (chosen from the launcher)")
    add("--transport", help="such as nccl, gloo or mpi (chosen from the launcher and the devices)")
    add("--metrics", type=Path, metavar="FILE", help="write the results as one JSON object")
    add("--plot", type=Path, metavar="FILE.png", help="draw loss and accuracy per epoch (needs matplotlib)")
    add("--log-dir", type=Path, metavar="FOLDER", help="write TensorBoard scalars (needs tensorboard)")
    add(
        "--checkpoint-dir",
        type=Path,
        metavar="FOLDER",
        help="save the run there, and go on from what is there",
    )
    add(
        "--save-every", type=number(int, 1), default=100, metavar="STEPS", help="and each epoch (%(default)s)"
    )
    add("--resume", default="auto", metavar="auto|never|PATH", help="where to go on from (%(default)s)")
    settings = parser.parse_args()
    if settings.warmup_epochs > settings.epochs:
        parser.error(f"--warmup-epochs must be at most --epochs, but is {settings.warmup_epochs} instead.")
    return settings


def train(settings: argparse.Namespace) -> None:
    device, data = hvd.device(), load_data(settings)
    sampler = DistributedSampler[Any](data.train, hvd.size(), hvd.rank(), seed=settings.seed, drop_last=True)
    batch_size = min(settings.batch_size, len(sampler))
    if batch_size == 0:
        fail(f"--data must hold an image per process, but has {len(data.train)}. Start fewer processes.")
    own = torch.Generator()  # the loader draws from it, and leaves dropout's numbers alone when a run goes on
    loader = DataLoader(data.train, batch_size, sampler=sampler, drop_last=True, generator=own)

    torch.manual_seed(settings.seed + hvd.rank())  # own dropout per rank; the weights are made equal below
    model = build_model(settings.model, data).to(device)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = build_optimizer(model, settings)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    warmup, steps = settings.warmup_epochs * len(loader), settings.epochs * len(loader)
    scheduler = build_scheduler(optimizer, warmup=warmup, steps=steps)

    report = Report(settings, steps_per_epoch=len(loader), images_per_step=batch_size * hvd.size())
    state = {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "epochs": report.epochs,
        "images": 0,
    }
    manager = open_checkpoints(settings, state)
    report.epochs = state["epochs"]
    for epoch in range(len(report.epochs), settings.epochs):
        first = state["images"] // report.images_per_step  # the batch to go on with
        started = time.perf_counter()
        sampler.set_epoch(epoch)
        model.train()
        loss_sum = torch.zeros(1, dtype=torch.float64, device=device)
        bar = tqdm(loader, f"epoch {epoch + 1}", leave=False, disable=report.hides_bar)
        for images, labels in itertools.islice(bar, first, None):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()
            scheduler.step()
            loss_sum += loss.detach()
            state["images"] += report.images_per_step
            if manager:
                manager.step()
        # All batches are equally large: the mean over batches and ranks is the mean over the images.
        train_loss = hvd.allreduce(loss_sum, op=hvd.Average).item() / max(1, len(loader) - first)
        seconds = time.perf_counter() - started
        report.add_epoch(train_loss, *evaluate(model, data.val, batch_size, device), seconds)
        state["images"] = 0
        if manager:
            manager.save({"val_accuracy": report.epochs[-1]["val_accuracy"]})
    report.finish()


def open_checkpoints(
    settings: argparse.Namespace, state: dict[str, Any]
) -> hvd.checkpoint.CheckpointManager | None:
    """Return what saves the run, after the run is where --resume says; None without --checkpoint-dir. Collective."""
    if settings.checkpoint_dir is None:
        return None
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
        log(f"going on after step {manager.steps}")
    return manager


@torch.no_grad()
def evaluate(model: nn.Module, dataset: Any, batch_size: int, device: torch.device) -> tuple[float, float]:
    """Return the mean loss and the accuracy over the whole data set, on every rank.

    Collective. Exactly one rank evaluates each image; a rank may have none.
    """
    # Batch-norm statistics differ between ranks: all evaluate with rank 0's.
    hvd.broadcast_parameters(dict(model.named_buffers()), root_rank=0)
    model.eval()
    shard = Subset(dataset, range(hvd.rank(), len(dataset), hvd.size()))
    totals = torch.zeros(2, dtype=torch.float64, device=device)
    for images, labels in DataLoader(shard, batch_size):
        outputs, labels = model(images.to(device)).double(), labels.to(device)
        correct = (outputs.argmax(1) == labels).sum()
        totals += torch.stack([F.cross_entropy(outputs, labels, reduction="sum"), correct])
    loss, accuracy = (hvd.allreduce(totals, op=hvd.Sum) / len(dataset)).tolist()
    return loss, accuracy


class Data(NamedTuple):
    """Two map-style data sets of (image, label), where an image is a tensor (channels, height, width)."""

    train: Any
    val: Any
    num_classes: int


def digits(folder: Path) -> Data:
    pixels, labels = (torch.tensor(array) for array in load_digits(return_X_y=True))
    images = (pixels / 8 - 1).float().view(-1, 1, 8, 8)
    parts = train_test_split(range(len(labels)), test_size=0.2, stratify=labels, random_state=0)
    train, val = (TensorDataset(images[part], labels[part]) for part in parts)
    return Data(train, val, num_classes=10)


def downloaded(dataset: Callable[..., Any], folder: Path) -> Data:
    if hvd.local_rank() == 0:
        with contextlib.suppress(OSError, RuntimeError):  # the reads below fail on every rank, and say so
            dataset(folder, download=True)
    hvd.barrier()
    train, val = (dataset(folder, train=part, transform=to_tensor()) for part in (True, False))
    return Data(train, val, num_classes=10)


def imagefolder(folder: Path) -> Data:
    crop = to_tensor(transforms.Resize(256), transforms.CenterCrop(224))
    train, val = (datasets.ImageFolder(folder / part, crop) for part in ("train", "val"))
    if train.classes != val.classes:
        raise RuntimeError("train and val hold different classes")
    return Data(train, val, len(train.classes))


def fake(folder: Path) -> Data:
    make = functools.partial(datasets.FakeData, image_size=(3, 32, 32), num_classes=10, transform=to_tensor())
    return Data(make(512), make(128, random_offset=512), num_classes=10)


def to_tensor(*first: nn.Module) -> nn.Module:
    scaled = (transforms.ToImage(), transforms.ToDtype(torch.float32, scale=True))
    return nn.Sequential(*first, *scaled, transforms.Normalize([0.5], [0.5]))


DATA: dict[str, Callable[[Path], Data]] = {
    "digits": digits,
    "mnist": functools.partial(downloaded, datasets.MNIST),
    "cifar10": functools.partial(downloaded, datasets.CIFAR10),
    "imagefolder": imagefolder,
    "fake": fake,
}
IN_DATA_DIR = {
    "mnist": "MNIST/raw (downloaded when absent)",
    "cifar10": "cifar-10-batches-py (downloaded when absent)",
    "imagefolder": "train/CLASS/IMAGE and val/CLASS/IMAGE",
}


def load_data(settings: argparse.Namespace) -> Data:
    """Return the data on every rank, or end every rank when one of them cannot read its copy. Collective."""
    problem = ""
    try:
        data = DATA[settings.data](settings.data_dir)
    except (OSError, RuntimeError) as error:
        problem = " ".join(str(error).split()).partition(". ")[0]
    if hvd.allreduce(torch.tensor([float(problem != "")], device=hvd.device()), op=hvd.Sum).item():
        problem = problem or "another host has no copy"
        fail(f"--data-dir must hold {IN_DATA_DIR[settings.data]}; {settings.data_dir} does not: {problem}.")
    return data


# These two have auxiliary outputs by default, and warn unless their initialisation is asked for.
NO_OUTPUTS_BESIDE = {"aux_logits": False, "init_weights": True}
MODEL_OPTIONS = {"googlenet": NO_OUTPUTS_BESIDE, "inception_v3": NO_OUTPUTS_BESIDE}


def build_model(name: str, data: Data) -> nn.Module:
    channels, height, _ = data.train[0][0].shape
    if name == "cnn":
        return small_cnn(channels, data.num_classes)
    smallest = min(weights.meta["min_size"][0] for weights in models.get_model_weights(name))
    model = models.get_model(name, num_classes=data.num_classes, **MODEL_OPTIONS.get(name, {}))
    size = max(32, height, smallest)
    return nn.Sequential(transforms.RGB(), transforms.Resize((size, size)), model)


def small_cnn(channels: int, num_classes: int) -> nn.Module:
    layers: list[nn.Module] = []
    pools = (nn.Identity(), nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(2))
    for inputs, outputs, pool in zip((channels, 32, 64), (32, 64, 128), pools, strict=True):
        convolution = nn.Conv2d(inputs, outputs, kernel_size=3, padding=1, bias=False)
        layers += [convolution, nn.BatchNorm2d(outputs), nn.ReLU(), pool]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(4 * 128, num_classes))


SCALE_LR: dict[str, Callable[[int], float]] = {"none": lambda size: 1.0, "sqrt": math.sqrt, "linear": float}


def build_optimizer(model: nn.Module, settings: argparse.Namespace) -> torch.optim.Optimizer:
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": settings.weight_decay},
        {"params": [p for p in model.parameters() if p.ndim <= 1], "weight_decay": 0.0},  # norms, biases
    ]
    lr = settings.lr * SCALE_LR[settings.scale_lr](hvd.size())
    return torch.optim.SGD(groups, lr=lr, momentum=settings.momentum)


def build_scheduler(optimizer: torch.optim.Optimizer, *, warmup: int, steps: int) -> LRScheduler:
    """Return a linear warm-up and then a cosine to zero, both counted in steps."""
    cosine = CosineAnnealingLR(optimizer, T_max=max(1, steps - warmup))
    if warmup == 0:
        return cosine
    linear = LinearLR(optimizer, start_factor=1 / warmup, total_iters=warmup)
    return SequentialLR(optimizer, [linear, cosine], milestones=[warmup])


class Report:
    """What is shown and kept of a run, by rank 0: bar, log lines, TensorBoard scalars, JSON, plot."""

    def __init__(self, settings: argparse.Namespace, *, steps_per_epoch: int, images_per_step: int) -> None:
        self.settings, self.steps_per_epoch, self.images_per_step = settings, steps_per_epoch, images_per_step
        self.started = time.perf_counter()
        self.epochs: list[dict[str, float]] = []
        self.hides_bar = None if hvd.rank() == 0 else True  # None: shown on a terminal only
        self.writer: Any = None
        log(f"{settings.model} on {settings.data}: {steps_per_epoch} steps of {images_per_step} images")
        if settings.log_dir and not importlib.util.find_spec("tensorboard"):
            log("--log-dir is ignored: tensorboard is not installed. pip install tensorboard")
        elif settings.log_dir and hvd.rank() == 0:
            from torch.utils.tensorboard import SummaryWriter

            self.writer = SummaryWriter(settings.log_dir)

    def add_epoch(self, train_loss: float, val_loss: float, val_accuracy: float, seconds: float) -> None:
        names = ("train_loss", "val_loss", "val_accuracy", "seconds", "samples_per_second")
        rate = self.steps_per_epoch * self.images_per_step / seconds
        self.epochs.append(dict(zip(names, (train_loss, val_loss, val_accuracy, seconds, rate), strict=True)))
        losses = f"training loss {train_loss:.4f}, validation loss {val_loss:.4f}"
        log(f"epoch {len(self.epochs)}: {losses}, accuracy {val_accuracy:.4f}, {rate:,.0f} images/s")
        if self.writer:
            for name, value in self.epochs[-1].items():
                self.writer.add_scalar(name, value, len(self.epochs))

    def finish(self) -> None:
        """Write the files and the last line."""
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
        print(message + "\n", end="", flush=True)  # one write: launchers put a prefix before each


def plot(epochs: list[dict[str, float]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.5), layout="constrained")
    panels = (("train_loss", "val_loss"), ("val_accuracy",))
    for axes, names in zip(figure.subplots(1, 2), panels, strict=True):
        for name in names:
            axes.plot(range(1, len(epochs) + 1), [epoch[name] for epoch in epochs], marker=".", label=name)
        axes.locator_params(axis="x", integer=True)
        axes.set_xlabel("epoch")
        axes.legend()
    figure.savefig(path, dpi=150)


def fail(message: str) -> NoReturn:
    """End with exit code 2 and one line on rank 0; the other ranks are silent."""
    rank = 0
    with contextlib.suppress(hvd.ConfigurationError):
        rank = hvd.launch_info().rank
    if rank == 0:
        print(f"train.py: error: {message}\n", end="", file=sys.stderr, flush=True)
    else:
        time.sleep(10)  # launchers end all ranks when one fails: let that be rank 0, after its line
    sys.exit(2)


class OneLineParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        fail(f"{message.removeprefix('argument ')} (see --help)")


def number(kind: type[int] | type[float], lowest: int, limit: float = math.inf) -> Callable[[str], float]:
    """Return a reader of numbers that are at least `lowest` and less than `limit`."""

    def read(text: str) -> float:
        with contextlib.suppress(ValueError):
            if lowest <= kind(text) < limit:
                return kind(text)
        rule = f"a {'whole ' if kind is int else ''}number of at least {lowest}"
        rule += f" and less than {limit}" if limit < math.inf else ""
        raise argparse.ArgumentTypeError(f"must be {rule}, but is {text} instead.")

    return read


def model_name(name: str) -> str:
    if name == "cnn" or name in models.list_models(module=models):
        return name
    rule = "cnn or a torchvision classification model such as resnet18"
    raise argparse.ArgumentTypeError(f"must be {rule}, but is {name} instead.")


def check_paths(settings: argparse.Namespace) -> None:
    """End with one line when a file or folder cannot be used, before any engine starts."""
    launch = hvd.launch_info()
    if launch.local_rank not in (None, launch.rank):
        return  # not on rank 0's host: nothing is written here, and load_data looks after the data
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
    torch.set_num_threads(settings.threads)  # the same under every launcher, so that the numbers are the same
    torch.backends.cudnn.deterministic = True
    try:
        check_paths(settings)
        hvd.init(backend=settings.backend, transport=settings.transport)
    except hvd.WorldMismatchError:
        raise  # on every rank: they do not even agree on who is rank 0
    except hvd.ConfigurationError as error:
        fail(str(error))
    train(settings)
    hvd.shutdown()


if __name__ == "__main__":
    main()
