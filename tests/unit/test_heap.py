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
"""Pages of the tensors of one step."""
_KEEP = "from dualdist.gradients.bucket_memory import keep_freed_memory; keep_freed_memory()"
_TRAIN = """
import dualdist as hvd
hvd.init()
model = hvd.DistributedDataParallel(torch.nn.Linear(2, 2))
model(torch.ones(2, 2)).sum().backward()
hvd.shutdown()
"""
_PRINT_CHUNKS = """
import ctypes

class Mallinfo2(ctypes.Structure):
    names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in names.split()]

mallinfo = ctypes.CDLL(None).mallinfo2
mallinfo.restype = Mallinfo2
before = mallinfo().hblks
chunk = torch.empty(30 * 2**20, dtype=torch.uint8)
print(mallinfo().hblks - before)
"""
_PRINT_PAGES = """
import resource

def step():
    [torch.ones(2**20) for _ in range(12)]  # 48 MiB at once

step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def output(*scripts: str, **environment: str) -> int:
    """Return the number that a process prints which runs the scripts."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("MALLOC_") and name not in ("GLIBC_TUNABLES", "LD_PRELOAD")
    }
    finished = subprocess.run(
        [sys.executable, "-c", "\n".join(["import torch", *scripts])],
        env=inherited | {"DUALDIST_LAUNCHER": "python"} | environment,
        stdout=subprocess.PIPE,
        check=True,
        text=True,
        timeout=120,
    )
    return int(finished.stdout)


@pytest.mark.parametrize("keep", [_KEEP, _TRAIN], ids=["function", "training"])
def test_a_large_chunk_comes_from_the_heap(keep: str) -> None:
    assert output(keep, _PRINT_CHUNKS) == 0


def test_without_that_a_large_chunk_is_mapped() -> None:
    assert output(_PRINT_CHUNKS) == 1


def test_freed_memory_is_used_again_without_page_faults() -> None:
    assert output(_KEEP, _PRINT_PAGES) < _PAGES


def test_malloc_variables_of_the_user_win() -> None:
    assert output(_KEEP, _PRINT_CHUNKS, MALLOC_MMAP_THRESHOLD_="131072") == 1
