"""Memory that a training step frees stays in the process."""

from __future__ import annotations

import os
import platform
import resource
import subprocess
import sys

import pytest

_PAGES = 48 * 2**20 // resource.getpagesize()
"""Those of one step."""
_SCRIPT = """
import resource
import torch
from dualdist.gradients.heap import keep_freed_memory

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def step():
    [torch.ones(2**20) for _ in range(12)]  # 48 MiB at once

for keeps in (False, True):
    if keeps:
        keep_freed_memory()
    step()
    before = faults()
    for _ in range(10):
        step()
    print(faults() - before, flush=True)
"""


def page_faults(**environment: str) -> tuple[int, int]:
    """Return how many pages 10 steps took from the kernel, before and after keep_freed_memory()."""
    output = subprocess.run(
        [sys.executable, "-c", _SCRIPT],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        check=True,
        text=True,
        timeout=120,
    ).stdout
    before, after = map(int, output.split())
    return before, after


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="malloc of another C library")
def test_freed_memory_is_used_again_without_page_faults() -> None:
    before, after = page_faults()
    assert before > 9 * _PAGES
    assert after < _PAGES


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="malloc of another C library")
def test_a_threshold_of_the_user_stays() -> None:
    _, after = page_faults(MALLOC_TRIM_THRESHOLD_="131072", MALLOC_MMAP_THRESHOLD_="131072")
    assert after > 9 * _PAGES
