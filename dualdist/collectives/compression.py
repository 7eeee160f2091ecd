"""Gradient compression: cast before sending, cast back after. Same shape as horovod/torch/compression.py."""

from __future__ import annotations

from typing import ClassVar

import torch

__all__ = ("Compression", "Compressor")


class Compressor:
    """What is sent in a tensor's place."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype | None]:
        """Return what to send for `tensor`, and what `decompress` needs."""
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: torch.dtype | None) -> torch.Tensor:
        """Return `tensor` as `compress` found it."""
        return tensor


class _Cast(Compressor):
    sent: ClassVar[torch.dtype]

    @classmethod
    def compress(cls, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype | None]:
        if not tensor.dtype.is_floating_point or tensor.dtype is cls.sent:
            return tensor, None
        return tensor.to(cls.sent), tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: torch.dtype | None) -> torch.Tensor:
        return tensor if ctx is None else tensor.to(ctx)


class _Float16(_Cast):
    sent = torch.float16


class _BFloat16(_Cast):
    sent = torch.bfloat16


class Compression:
    """The compressors to choose from: `none`, `fp16` and `bf16` (floating-point tensors alone are cast)."""

    none = Compressor
    fp16 = _Float16
    bf16 = _BFloat16
