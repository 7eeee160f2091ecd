"""`dualdist exec --bind`: which GPU and which CPUs a process gets. The files of the kernel are stand-ins."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dualdist.core.types import World
from dualdist.errors import ConfigurationError
from dualdist.exec import command

ADDRESSES = ("0000:17:00.0", "0000:65:00.0", "0001:03:00.0")
"""Of the GPUs; the last one is on NUMA node 1."""
UUIDS = ("GPU-8932f937-d72c", "GPU-8a01bb10-0c4e", "GPU-77c2e5a9-41d0")


def world(local_rank: int) -> World:
    return World(local_rank, 4, local_rank, 4, 0, 1)


@pytest.fixture(autouse=True)
def no_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_NVIDIA", "_AMD"):
        monkeypatch.setattr(command, name, tmp_path / "absent")


@pytest.fixture
def cpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[set[int]]:
    """The sets of CPUs to which this process is bound; before, it may use 0 to 7."""
    files = {"nodes/node0/cpulist": "0-3,8-11\n", "nodes/node1/cpulist": "4-7,12\n"}
    for number, address in enumerate(ADDRESSES):
        information = f"Model: \t\t NVIDIA A100\nGPU UUID: \t {UUIDS[number]}\n"
        files[f"gpus/{address.upper()}/information"] = information
        files[f"pci/{address}/numa_node"] = f"{-1 if number == 0 else number // 2}\n"
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(command, "_NVIDIA", tmp_path / "gpus")
    monkeypatch.setattr(command, "_PCI", tmp_path / "pci")
    monkeypatch.setattr(command, "_NODES", tmp_path / "nodes")
    bound: list[set[int]] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, numbers: bound.append(numbers))
    return bound


@pytest.mark.usefixtures("cpus")
def test_without_a_variable_the_local_rank_is_the_gpu() -> None:
    assert [command._bind("gpu", world(rank), {})["CUDA_VISIBLE_DEVICES"] for rank in (0, 2)] == ["0", "2"]
    with pytest.raises(ConfigurationError, match=r"has 3 for 4 processes \(CUDA_VISIBLE_DEVICES=not set\)"):
        command._bind("gpu", world(3), {})


def gpus_of(size: int, env: dict[str, str]) -> list[dict[str, str]]:
    """Return the variables of each of `size` processes."""
    return [command._bind("gpu", World(rank, size, rank, size, 0, 1), env) for rank in range(size)]


@pytest.mark.usefixtures("cpus")
@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (" 2, 0", ["2", "0"]),
        ("0,1,", ["0", "1"]),
        ("1,2,-1,0", ["1", "2"]),
        ("2,1,3,0", ["2", "1"]),  # there are three
        ("GPU-77,GPU-8932f937-d72c", ["GPU-77", "GPU-8932f937-d72c"]),
        ("GPU-77,1,GPU-8", ["GPU-77", "1"]),  # two begin in this way
        ("MIG-GPU-77/1/0,MIG-6f", ["MIG-GPU-77/1/0", "MIG-6f"]),
    ],
)
def test_each_process_gets_a_gpu_that_cuda_would_show(visible: str, expected: list[str]) -> None:
    bound = gpus_of(len(expected), {"CUDA_VISIBLE_DEVICES": visible, "ZE_AFFINITY_MASK": "7"})
    assert bound == [{"CUDA_VISIBLE_DEVICES": name} for name in expected]


@pytest.mark.usefixtures("cpus")
@pytest.mark.parametrize(
    ("visible", "count"),
    [
        *((none, 0) for none in ("", "-1", "NoDevFiles", "none", "GPU-8,GPU-77")),
        *((twice, 0) for twice in ("0,0", "1,GPU-8a")),
        *((one, 1) for one in ("1,-1,0", "0,", "0,3,1", "GPU-77,GPU-99")),
    ],
)
def test_more_processes_than_gpus_that_cuda_would_show_are_an_error(visible: str, count: int) -> None:
    with pytest.raises(ConfigurationError, match=rf"has {count} for 2 .* \(CUDA_VISIBLE_DEVICES={visible}\)"):
        gpus_of(2, {"CUDA_VISIBLE_DEVICES": visible})


def test_gpus_of_amd_are_counted_and_selected_in_two_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for node, number in enumerate((0, 0, 51110, 24610, 1533)):  # the first two are CPUs
        (tmp_path / f"{node}").mkdir()
        (tmp_path / f"{node}" / "gpu_id").write_text(f"{number}\n")
    (tmp_path / "5" / "gpu_id").mkdir(parents=True)  # cannot be read: the GPU is another container's
    monkeypatch.setattr(command, "_AMD", tmp_path)
    assert gpus_of(3, {}) == [{"HIP_VISIBLE_DEVICES": number} for number in "012"]
    # What Slurm sets, and a user's choice within it.
    slurm = {"CUDA_VISIBLE_DEVICES": "1,2", "ROCR_VISIBLE_DEVICES": "1,2"}
    assert gpus_of(2, slurm | {"HIP_VISIBLE_DEVICES": "1,0"}) == [{"HIP_VISIBLE_DEVICES": n} for n in "10"]
    assert gpus_of(2, {"ROCR_VISIBLE_DEVICES": "2,1"}) == [{"ROCR_VISIBLE_DEVICES": n} for n in "21"]
    for env, count in (
        ({}, 3),
        (slurm | {"HIP_VISIBLE_DEVICES": "0,2,1"}, 1),
        (slurm | {"HIP_VISIBLE_DEVICES": ""}, 0),
    ):
        with pytest.raises(ConfigurationError, match=rf"has {count} for 4 processes \(HIP_VISIBLE_DEVICES="):
            gpus_of(4, env)


def test_gpus_that_the_kernel_does_not_list_are_those_of_the_variables() -> None:
    assert gpus_of(2, {"ZE_AFFINITY_MASK": "0.1,1.0"}) == [{"ZE_AFFINITY_MASK": n} for n in ("0.1", "1.0")]
    # The launcher has given one to each process.
    assert command._bind("gpu", world(3), {"HIP_VISIBLE_DEVICES": "5"}) == {"HIP_VISIBLE_DEVICES": "5"}
    # Slurm's default for a GPU of unknown kind.
    both = {"CUDA_VISIBLE_DEVICES": "4,5", "ASCEND_RT_VISIBLE_DEVICES": "4,5"}
    assert gpus_of(2, both) == [dict.fromkeys(both, "4"), dict.fromkeys(both, "5")]
    with pytest.raises(ConfigurationError, match=r"0 for 1 .*set CUDA_.* ZE_AFFINITY_MASK, .* ASCEND_RT_"):
        gpus_of(1, {})


@pytest.mark.parametrize(
    ("local_rank", "visible", "expected"),
    [
        (0, None, {0, 1, 2, 3}),
        (1, None, {0, 1, 2, 3}),
        (2, None, {4, 5, 6, 7}),
        (0, "2, 1", {4, 5, 6, 7}),
        (1, "1, 2", {4, 5, 6, 7}),
        (1, "GPU-89,GPU-77", {4, 5, 6, 7}),
    ],
)
def test_a_process_runs_on_the_cpus_of_the_numa_node_of_its_gpu(
    cpus: list[set[int]], local_rank: int, visible: str | None, expected: set[int]
) -> None:
    env = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert command._bind("numa", world(local_rank), env) == {}
    assert cpus == [expected]


@pytest.mark.usefixtures("cpus")
def test_what_cannot_be_bound_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match=r"needs the number or UUID of an NVIDIA GPU, but .* has 'MIG-77'"):
        command._bind("numa", world(1), {"CUDA_VISIBLE_DEVICES": "0,MIG-77"})
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {4, 5})
    with pytest.raises(ConfigurationError, match="CPUs of NUMA node 0, beside GPU 1"):
        command._bind("numa", world(1), {})
