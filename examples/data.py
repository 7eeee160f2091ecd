"""Data sets of (image, label) and image classifiers, for train.py, mnist.py and cifar10.py.

scikit-learn and torchvision are imported where they are needed, so that `--help` works without them.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.data import TensorDataset

import dualdist as hvd


class Data(NamedTuple):
    """Two map-style data sets of (image, label), where an image is a tensor (channels, height, width)."""

    train: Any
    val: Any
    num_classes: int
    views: Callable[[torch.Tensor], list[torch.Tensor]]
    """Returns views of a batch of images (n, channels, height, width); the labels stay valid."""


def mirrored(images: torch.Tensor) -> list[torch.Tensor]:
    return [images, images.flip(-1)]


def shifted(images: torch.Tensor) -> list[torch.Tensor]:
    """Return the images and copies shifted by one pixel to the left and right. A mirrored digit is not a digit."""
    left, right = (nn.functional.pad(images, (-by, by), value=-1) for by in (1, -1))
    return [images, left, right]


def digits(folder: Path | None = None) -> Data:
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    pixels, labels = (torch.tensor(array) for array in load_digits(return_X_y=True))
    images = (pixels / 8 - 1).float().view(-1, 1, 8, 8)
    parts = train_test_split(range(len(labels)), test_size=0.2, stratify=labels, random_state=0)
    train, val = (TensorDataset(images[part], labels[part]) for part in parts)
    return Data(train, val, 10, shifted)


def downloaded(name: str, place: str, views: Callable[..., Any], folder: Path) -> Data:
    """Return torchvision's data set `name`, which is in `place` below `folder`, and downloaded if absent. Collective.

    Rank 0 downloads it first, because the hosts may share the folder. Then one process of each host does if it is
    absent there. Raises RuntimeError on every rank when a host cannot download it.
    """
    from torchvision import datasets

    dataset = getattr(datasets, name)
    for downloads in (hvd.rank() == 0, hvd.local_rank() == 0):
        problem = None
        if downloads:
            try:
                dataset(folder, download=True)
            except (OSError, RuntimeError) as error:
                reason = " ".join(str(error).split())
                problem = f"{name} cannot be downloaded to {folder}: {reason.rstrip('. ')}"
        if problems := list(filter(None, hvd.allgather_object(problem))):  # waits for all ranks
            raise RuntimeError(f"{problems[0]}. Copy {place} there from a machine with a network.")
    train, val = (dataset(folder, train=part, transform=to_tensor()) for part in (True, False))
    return Data(train, val, 10, views)


def imagefolder(folder: Path) -> Data:
    from torchvision import datasets
    from torchvision.transforms import v2 as transforms

    crop = to_tensor(transforms.Resize(256), transforms.CenterCrop(224))
    train, val = (datasets.ImageFolder(folder / part, crop) for part in ("train", "val"))
    if train.classes != val.classes:
        raise RuntimeError("train and val hold different classes")
    return Data(train, val, len(train.classes), mirrored)


def fake(folder: Path | None = None) -> Data:
    from torchvision import datasets

    make = functools.partial(datasets.FakeData, image_size=(3, 32, 32), num_classes=10, transform=to_tensor())
    return Data(make(512), make(128, random_offset=512), 10, mirrored)


def to_tensor(*first: nn.Module) -> nn.Module:
    from torchvision.transforms import v2 as transforms

    scaled = (transforms.ToImage(), transforms.ToDtype(torch.float32, scale=True))
    return nn.Sequential(*first, *scaled, transforms.Normalize([0.5], [0.5]))


DATA: dict[str, Callable[[Path], Data]] = {
    "digits": digits,
    "mnist": functools.partial(downloaded, "MNIST", "MNIST/raw", shifted),
    "cifar10": functools.partial(downloaded, "CIFAR10", "cifar-10-batches-py", mirrored),
    "imagefolder": imagefolder,
    "fake": fake,
}
IN_DATA_DIR = {
    "mnist": "MNIST/raw (downloaded when absent)",
    "cifar10": "cifar-10-batches-py (downloaded when absent)",
    "imagefolder": "train/CLASS/IMAGE and val/CLASS/IMAGE",
}


# By default these two have auxiliary outputs, and warn about their initialisation.
NO_AUXILIARY_OUTPUTS = {"aux_logits": False, "init_weights": True}
MODEL_OPTIONS = {"googlenet": NO_AUXILIARY_OUTPUTS, "inception_v3": NO_AUXILIARY_OUTPUTS}


def build_model(name: str, data: Data) -> nn.Module:
    channels, height, _ = data.train[0][0].shape
    if name == "cnn":
        return small_cnn(channels, data.num_classes)
    from torchvision import models
    from torchvision.transforms import v2 as transforms

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


def model_name(name: str) -> str:
    if name == "cnn":
        return name
    from torchvision import models

    if name in models.list_models(module=models):
        return name
    rule = "cnn or a torchvision classification model such as resnet18"
    raise argparse.ArgumentTypeError(f"must be {rule}, but is {name} instead.")
