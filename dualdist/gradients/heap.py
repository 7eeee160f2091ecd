"""Keeps the memory that each training step frees and allocates again, instead of giving it back to the kernel."""

from __future__ import annotations

import functools

import torch

__all__ = ("keep_freed_memory",)

_LARGEST_BYTES = (32 << 20) - (1 << 14)
"""The largest chunk whose release raises the thresholds (DEFAULT_MMAP_THRESHOLD_MAX), less alignment and its header."""


@functools.cache
def keep_freed_memory() -> None:
    """Let malloc keep up to 64 MiB at the end of the heap, if it is glibc's. Local, once in a process.

    At first, glibc takes each chunk above 128 KiB from the kernel, and gives as much back as soon as it is free at the
    end of the heap. A CPU then spends a fifth of a step of ResNet-18 in the page faults of memory that it had before.
    Releasing a larger chunk raises both thresholds (M_MMAP_THRESHOLD and M_TRIM_THRESHOLD in mallopt(3)), as soon as
    a program does that; here it is done at the start. It has no effect if MALLOC_TRIM_THRESHOLD_, MALLOC_TOP_PAD_,
    MALLOC_MMAP_THRESHOLD_ or MALLOC_MMAP_MAX_ is set, or the tunables of the same names.
    """
    # Its pages are never written, so they cost no memory.
    torch.empty(_LARGEST_BYTES, dtype=torch.uint8, device="cpu")
