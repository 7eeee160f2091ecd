"""Compression of what a reduction sends: a cast before it and a cast back after.

The interface of horovod/torch/compression.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch

from ..checks import wrong


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


Restore = Callable[[tuple[torch.Tensor, ...]], tuple[torch.Tensor, ...]]


def compressed(tensors: list[torch.Tensor], compression: Any) -> tuple[list[torch.Tensor], Restore]:
    """Return the compressed `tensors`, and what decompresses as many results. compression: another than none."""
    compression = checked_compression(compression)
    pairs = [compression.compress(tensor) for tensor in tensors]
    return [sent for sent, _ in pairs], lambda outputs: tuple(
        [compression.decompress(output, ctx) for output, (_, ctx) in zip(outputs, pairs, strict=True)]
    )


def checked_compression(compression: Any) -> Any:
    """Return `compression`, or its class if that is one of `Compression`. Raise TypeError unless it is a Compressor."""
    if not all(callable(getattr(compression, name, None)) for name in ("compress", "decompress")):
        raise wrong(
            "compression",
            "Compression.none, fp16 or bf16, or have compress() and decompress() as these",
            compression,
            error=TypeError,
        )
    kind = type(compression)
    return kind if kind in (Compression.none, Compression.fp16, Compression.bf16) else compression


class Compression:
    """The compressors: `none`, `fp16` and `bf16`. They cast only floating-point tensors."""

    none = Compressor
    fp16 = _Float16
    bf16 = _BFloat16
