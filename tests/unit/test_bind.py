"""`dualdist exec --bind`: which GPU and which CPUs a process gets. The files of the kernel are stand-ins."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dualdist.cli import exec as command
from dualdist.errors import ConfigurationError
from dualdist.types import World

ADDRESSES = ("0000:17:00.0", "0000:65:00.0", "0001:03:00.0")
"""Of the GPUs; the last one is on NUMA node 1."""


def world(local_rank: int) -> World:
    return World(local_rank, 4, local_rank, 4, 0, 1)


@pytest.fixture
def cpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[set[int]]:
    """The sets of CPUs to which this process is bound; before, it may use 0 to 7."""
    for number, address in enumerate(ADDRESSES):
        (tmp_path / "gpus" / address.upper()).mkdir(parents=True)
        (tmp_path / "pci" / address).mkdir(parents=True)
        (tmp_path / "pci" / address / "numa_node").write_text(f"{-1 if number == 0 else number // 2}\n")
    for node, numbers in enumerate(("0-3,8-11", "4-7,12")):
        (tmp_path / "nodes" / f"node{node}").mkdir(parents=True)
        (tmp_path / "nodes" / f"node{node}" / "cpulist").write_text(f"{numbers}\n")
    monkeypatch.setattr(command, "_NVIDIA", tmp_path / "gpus")
    monkeypatch.setattr(command, "_PCI", tmp_path / "pci")
    monkeypatch.setattr(command, "_NODES", tmp_path / "nodes")
    bound: list[set[int]] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, numbers: bound.append(numbers))
    return bound


@pytest.mark.usefixtures("cpus")
def test_without_a_variable_the_local_rank_is_the_gpu() -> None:
    assert [command._bind("gpu", world(rank), {}) for rank in (0, 2)] == [
        {"CUDA_VISIBLE_DEVICES": "0"},
        {"CUDA_VISIBLE_DEVICES": "2"},
    ]
    with pytest.raises(ConfigurationError, match=r"has 3 for 4 processes \(CUDA_VISIBLE_DEVICES=not set\)"):
        command._bind("gpu", world(3), {})


def test_a_gpu_that_the_launcher_has_given_to_each_process_stays() -> None:
    assert command._bind("gpu", world(3), {"HIP_VISIBLE_DEVICES": "5"}) == {"HIP_VISIBLE_DEVICES": "5"}


@pytest.mark.parametrize(
    ("local_rank", "visible", "expected"),
    [(0, "", {0, 1, 2, 3}), (1, "", {0, 1, 2, 3}), (2, "", {4, 5, 6, 7}), (0, "2,1", {4, 5, 6, 7})],
)
def test_a_process_runs_on_the_cpus_of_the_numa_node_of_its_gpu(
    cpus: list[set[int]], local_rank: int, visible: str, expected: set[int]
) -> None:
    assert command._bind("numa", world(local_rank), {"CUDA_VISIBLE_DEVICES": visible}) == {}
    assert cpus == [expected]


@pytest.mark.usefixtures("cpus")
def test_what_cannot_be_bound_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ConfigurationError, match=r"needs the number of one of 3 NVIDIA GPUs, but .* has 'GPU-77'"
    ):
        command._bind("numa", world(1), {"CUDA_VISIBLE_DEVICES": "0,GPU-77"})
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {4, 5})
    with pytest.raises(ConfigurationError, match="CPUs of NUMA node 0, beside GPU 1"):
        command._bind("numa", world(1), {})
