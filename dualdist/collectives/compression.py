"""Gradient compression: a cast before sending and a cast back after. The interface of horovod/torch/compression.py."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from ..agreement.call_kinds import Kind
from ..checks import wrong
from ..world.process_sets import ProcessSet, reporting
from .plan import check_tensors


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


def compressed(
    tensors: Any, compression: Any, kind: Kind, process_set: ProcessSet, *, grouped: bool = False
) -> tuple[list[torch.Tensor], list[Any]]:
    """Return the compressed `tensors`, and the `ctx` of each. The other ranks get an error of `kind` if it fails."""
    with reporting(kind, process_set):
        compression = checked_compression(compression)
        pairs = [compression.compress(tensor) for tensor in check_tensors(tensors, grouped=grouped)]
        return [sent for sent, _ in pairs], [ctx for _, ctx in pairs]


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
