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
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(128 * 16, 10)), torch.randn(16, 3, 32, 32)


def _resnet(name: str, batch: int) -> tuple[nn.Module, torch.Tensor]:
    from torchvision import models

    network: nn.Module = getattr(models, name)(num_classes=10)
    return network, torch.randn(batch, 3, 64, 64)


def _mlp() -> tuple[nn.Module, torch.Tensor]:
    width = 7200
    return nn.Sequential(*[nn.Linear(width, width) for _ in range(4)]), torch.randn(4, width)


def _small() -> tuple[nn.Module, torch.Tensor]:
    return nn.Sequential(*[nn.Linear(32, 32) for _ in range(120)]), torch.randn(4, 32)


def _transformer() -> tuple[nn.Module, torch.Tensor]:
    layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 6, enable_nested_tensor=False), torch.randn(4, 32, 256)


class _Block(nn.Module):
    """A residual block of two linear layers."""

    def __init__(self, width: int, norm_dtype: torch.dtype, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, dtype=norm_dtype)
        self.layers = nn.Sequential(
            nn.Linear(width, width, dtype=dtype), nn.GELU(), nn.Linear(width, width, dtype=dtype)
        )

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        normed = self.norm(inputs.to(self.norm.weight.dtype))
        added: torch.Tensor = self.layers(normed.to(inputs.dtype))
        return inputs + added


class _Blocks(nn.Module):
    """A first layer, eight blocks and a head, of width 720; see `_blocks`."""

    def __init__(self, first_is_last: bool, dtype: torch.dtype) -> None:
        super().__init__()
        width = 720
        first = nn.Linear(width, width, dtype=dtype)
        if not first_is_last:
            self.first = first
        self.blocks = nn.Sequential(*[_Block(width, torch.float32, dtype) for _ in range(8)])
        self.head = nn.Linear(width, 10)
        if first_is_last:
            self.first = first

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.blocks(self.first(inputs.to(self.first.weight.dtype)))
        output: torch.Tensor = self.head(hidden.float())
        return output


def _blocks(*, first_is_last: bool = False, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, torch.Tensor]:
    """Return a model and its batch.

    Args:
        first_is_last: whether the layer that is used first is registered last, as a stem after the blocks of a UNet.
        dtype: of the linear layers of the body; head and norms are float32.
    """
    return _Blocks(first_is_last, dtype), torch.randn(750, 720)


MODELS: Mapping[str, Model] = {
    "cnn": Model(_cnn, 60, "3 convolutions with BatchNorm, 0.5 MB: computation"),
    "resnet18": Model(lambda: _resnet("resnet18", 4), 12, "torchvision's ResNet-18, 45 MB"),
    "resnet50": Model(lambda: _resnet("resnet50", 2), 8, "torchvision's ResNet-50, 94 MB"),
    "mlp": Model(_mlp, 6, "4 linear layers, 207 MB: communication"),
    "small": Model(_small, 150, "240 tensors, 0.5 MB: bookkeeping"),
    "transformer": Model(_transformer, 40, "6 encoder layers of width 256, 19 MB"),
    "blocks": Model(_blocks, 8, "8 residual blocks of width 720, 36 MB: backward hides the transfer"),
    "mixed": Model(lambda: _blocks(dtype=torch.float64), 8, "the blocks in float64, norms and head in float32"),
    "late": Model(lambda: _blocks(first_is_last=True), 8, "the blocks, the first layer registered last"),
}
"""name -> the model."""
