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
_HELPERS = """
import ctypes, resource, torch
import dualdist as hvd

class Mallinfo2(ctypes.Structure):
    names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in names.split()]

mallinfo = ctypes.CDLL(None).mallinfo2
mallinfo.restype = Mallinfo2
chunks = []  # when malloc frees a chunk that was mapped, it maps only larger ones from then on

def print_mapped():
    before = mallinfo().hblks
    chunks.append(torch.empty(30 * 2**20, dtype=torch.uint8))
    print(mallinfo().hblks - before)

def step():
    [torch.ones(2**20) for _ in range(12)]  # 48 MiB at once

def train():
    hvd.init()
    model = hvd.DistributedDataParallel(torch.nn.Linear(2, 2))
    model(torch.ones(2, 2)).sum().backward()
    hvd.shutdown()

def print_faults():
    step()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        step()
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def printed(script: str, **environment: str) -> list[int]:
    """Return the numbers that a new process prints which runs the script."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("MALLOC_") and name not in ("GLIBC_TUNABLES", "LD_PRELOAD")
    }
    finished = subprocess.run(
        [sys.executable, "-c", _HELPERS + script],
        env=inherited | {"DUALDIST_LAUNCHER": "python"} | environment,
        stdout=subprocess.PIPE,
        check=True,
        text=True,
        timeout=120,
    )
    return [int(number) for number in finished.stdout.split()]


@pytest.mark.only_ci
def test_after_training_a_large_chunk_comes_from_the_heap_and_is_used_again_without_page_faults() -> None:
    before, after, faults = printed("print_mapped(); train(); print_mapped(); print_faults()")
    assert (before, after) == (1, 0)
    assert faults < _PAGES


@pytest.mark.only_ci
def test_malloc_variables_of_the_user_win() -> None:
    assert printed("train(); print_mapped()", MALLOC_MMAP_THRESHOLD_="131072") == [1]
