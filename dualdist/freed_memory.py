"""Keeps the memory that each training step frees and allocates again, instead of giving it back to the kernel."""

from __future__ import annotations

import functools

import torch

_CHUNK_BYTES = (32 << 20) - (1 << 14)
"""The largest chunk whose release raises the limits on 64-bit (DEFAULT_MMAP_THRESHOLD_MAX), less its alignment."""
_CHUNKS = 4
"""So that one is mapped, also if the heap has some room for them."""


@functools.cache
def keep_freed_memory() -> None:
    """Raise two limits of malloc, if it is glibc's, so that a step uses the memory that the last one has freed.

    By default, glibc maps each chunk of 128 KiB or more from the kernel, and unmaps it when it is freed; and it gives
    as much back as soon as it is free at the end of the heap. Each page must then be mapped again, which takes a fifth
    of a step of ResNet-18 on a CPU. When a program frees a mapped chunk of up to 32 MiB, glibc raises M_MMAP_THRESHOLD
    to its size and M_TRIM_THRESHOLD to twice that (mallopt(3)). This function frees such chunks. Local, once in a
    process. It has no effect if the program has set one of M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD and
    M_MMAP_MAX, or the user the variables of those names, such as MALLOC_TRIM_THRESHOLD_.
    """
    # Their pages are not written, unless torch fills new tensors, so they cost no memory.
    chunks = [torch.empty(_CHUNK_BYTES, dtype=torch.uint8, device="cpu") for _ in range(_CHUNKS)]
    del chunks
