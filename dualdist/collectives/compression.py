"""Gradient compression: a cast before sending and a cast back after. The interface of horovod/torch/compression.py."""

from __future__ import annotations

from typing import ClassVar

import torch

__all__ = ("Compression", "Compressor")


class Compressor:
    """Sends tensors as they are; the base class of compressors."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype | None]:
        """Return the tensor to send, and the `ctx` of `decompress`."""
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: torch.dtype | None) -> torch.Tensor:
        """Return `tensor` with the dtype that it had before `compress`."""
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
    """The compressors: `none`, `fp16` and `bf16`. They cast only floating-point tensors."""

    none = Compressor
    fp16 = _Float16
    bf16 = _BFloat16
