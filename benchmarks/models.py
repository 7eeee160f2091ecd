"""The models whose training steps are measured, each with a batch of one process. Sizes are for a core of a CPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

__all__ = ("MODELS", "Model")


@dataclass(frozen=True)
class Model:
    """A model to train."""

    make: Callable[[], tuple[nn.Module, torch.Tensor]]
    """Returns the network and a batch."""
    steps: int
    """How many steps one process measures: about two seconds."""
    what: str
    """What takes the time, for `--help` and the table."""


def _cnn() -> tuple[nn.Module, torch.Tensor]:
    layers: list[nn.Module] = []
    for inputs, outputs in ((3, 32), (32, 64), (64, 128)):
        layers += [
            nn.Conv2d(inputs, outputs, 3, padding=1),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.MaxPool2d(2),
        ]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(128 * 16, 10)), torch.randn(16, 3, 32, 32)


def _resnet(name: str, batch: int) -> tuple[nn.Module, torch.Tensor]:
    from torchvision import models

    network: nn.Module = getattr(models, name)(num_classes=10)
    return network, torch.randn(batch, 3, 64, 64)


def _mlp() -> tuple[nn.Module, torch.Tensor]:
    width = 3600
    return nn.Sequential(*[nn.Linear(width, width) for _ in range(4)]), torch.randn(4, width)


def _small() -> tuple[nn.Module, torch.Tensor]:
    return nn.Sequential(*[nn.Linear(32, 32) for _ in range(120)]), torch.randn(4, 32)


def _transformer() -> tuple[nn.Module, torch.Tensor]:
    layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 6, enable_nested_tensor=False), torch.randn(4, 32, 256)


MODELS: Mapping[str, Model] = {
    "cnn": Model(_cnn, 60, "3 convolutions with BatchNorm, 0.5 MB: computation"),
    "resnet18": Model(lambda: _resnet("resnet18", 4), 12, "torchvision's ResNet-18, 45 MB"),
    "resnet50": Model(lambda: _resnet("resnet50", 2), 8, "torchvision's ResNet-50, 94 MB"),
    "mlp": Model(_mlp, 6, "4 linear layers, 207 MB: communication"),
    "small": Model(_small, 150, "240 tensors, 0.5 MB: bookkeeping"),
    "transformer": Model(_transformer, 25, "6 encoder layers of width 256, 19 MB"),
}
"""name -> the model."""
