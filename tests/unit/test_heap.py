"""Memory that a training step frees stays in the process."""

from __future__ import annotations

import ctypes
import os
import resource
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="not glibc 2.33 or later")

_PAGES = 48 * 2**20 // resource.getpagesize()
"""Those of one step."""
_SCRIPT = """
import ctypes
import resource
import sys
import torch
from dualdist.gradients.heap import keep_freed_memory

class Mallinfo2(ctypes.Structure):
    names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in names.split()]

mallinfo = ctypes.CDLL(None).mallinfo2
mallinfo.restype = Mallinfo2

def step():
    [torch.ones(2**20) for _ in range(12)]  # 48 MiB at once

if sys.argv[1] == "keep":
    keep_freed_memory()
mapped = mallinfo().hblks
chunk = torch.empty(30 * 2**20, dtype=torch.uint8)
print(mallinfo().hblks - mapped)
del chunk
step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def run(what: str, **environment: str) -> tuple[int, int]:
    """Return how many chunks of 30 MiB the kernel gave, and how many pages it gave in 10 steps after that."""
    output = subprocess.run(
        [sys.executable, "-c", _SCRIPT, what],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        check=True,
        text=True,
        timeout=120,
    ).stdout
    chunks, pages = map(int, output.split())
    return chunks, pages


def test_freed_memory_is_used_again_without_page_faults() -> None:
    chunks, pages = run("keep")
    assert chunks == 0
    assert pages < _PAGES


def test_a_chunk_comes_from_the_kernel_without_that() -> None:
    chunks, _ = run("leave")
    assert chunks == 1


def test_a_threshold_of_the_user_stays() -> None:
    chunks, pages = run("keep", MALLOC_MMAP_THRESHOLD_="131072")
    assert chunks == 1
    assert pages >= 10 * _PAGES
