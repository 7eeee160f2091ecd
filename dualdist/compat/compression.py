"""The names of horovod.torch.compression."""

from __future__ import annotations

from ..collectives.compression import Compression, Compressor

__all__ = ("Compression", "Compressor", "FP16Compressor", "NoneCompressor")

NoneCompressor = Compression.none
FP16Compressor = Compression.fp16
