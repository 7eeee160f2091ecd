"""The memory that ranks of a host share."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

from dualdist.shared_memory.mesh import Memory, make_memory


def test_a_core_dump_leaves_the_memory_out() -> None:
    memory = Memory(make_memory(2), 0, 2)
    areas = Path("/proc/self/smaps").read_text().split("VmFlags:")
    flags = [after.partition("\n")[0].split() for before, after in pairwise(areas) if "/memfd:dualdist" in before]
    del memory
    assert flags
    assert all("dd" in flag for flag in flags)
