"""The hosts of a job, from the variables and files of resource managers as their manuals describe them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from dualdist.errors import ConfigurationError
from dualdist.launch.detect import host_names, node_counts
from dualdist.processes.hosts import find_allocation

SLURM = {"SLURM_JOB_NODELIST": "node[07-08,20]", "SLURM_JOB_CPUS_PER_NODE": "64(x3)"}


def hosts(env: Mapping[str, str]) -> dict[str, int]:
    found = find_allocation(env)
    assert found is not None
    assert found.variable in env
    return {host.name: host.slots for host in found.hosts}


def test_outside_a_job_there_is_none() -> None:
    assert find_allocation({"HOME": "/root", "PBS_NODEFILE": ""}) is None


def test_slurm_gives_the_tasks_of_each_node_else_its_cpus() -> None:
    assert hosts({**SLURM, "SLURM_TASKS_PER_NODE": "4(x2),3"}) == {"node07": 4, "node08": 4, "node20": 3}
    assert hosts(SLURM) == {"node07": 64, "node08": 64, "node20": 64}
    assert hosts({"SLURM_JOB_NODELIST": "a,b"}) == {"a": 1, "b": 1}


@pytest.mark.parametrize("variable", ["PBS_NODEFILE", "LSB_DJOB_HOSTFILE", "COBALT_NODEFILE"])
def test_a_file_with_a_line_for_each_slot(variable: str, tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("n1\nn1\nn2\nn1\n")
    assert hosts({variable: str(file)}) == {"n1": 3, "n2": 1}


def test_lsf_pairs_of_hosts_and_slots() -> None:
    assert hosts({"LSB_MCPU_HOSTS": "hostA 4 hostB 2 "}) == {"hostA": 4, "hostB": 2}


def test_grid_engine_lines_of_host_and_slots(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("n1.site 4 all.q@n1.site UNDEFINED\nn2.site 2 all.q@n2.site <NULL>\n")
    assert hosts({"PE_HOSTFILE": str(file)}) == {"n1.site": 4, "n2.site": 2}


def flux_command(folder: Path, script: str) -> dict[str, str]:
    """Return the environment of a Flux instance. In place of Flux's command, which has no package here, a script."""
    file = folder / "flux"
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(0o755)
    return {"FLUX_URI": "local:///run/flux/local", "PATH": f"{folder}:/usr/bin:/bin"}


def test_flux_gives_the_cores_of_each_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Three nodes in the form that flux/resource/Rv1Set.py (flux-python 0.88) writes.
    resources = (
        '{"version": 1, "execution": {"R_lite": [{"rank": "0-1", "children": {"core": "0-7", "gpu": "0"}}, '
        '{"rank": "3", "children": {"core": "0-1,4"}}], "starttime": 0.0, "expiration": 0.0, '
        '"nodelist": ["tux[07-08],gpu1"]}}'
    )
    env = flux_command(tmp_path, f"test \"$*\" = 'resource R' && echo '{resources}'")
    monkeypatch.setenv("PATH", env["PATH"])
    assert hosts(env) == {"tux07": 8, "tux08": 8, "gpu1": 3}


@pytest.mark.parametrize("script", ["echo no broker >&2; exit 1", "echo '{}'", "echo nothing"])
def test_flux_without_resources_is_an_error(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = flux_command(tmp_path, script)
    monkeypatch.setenv("PATH", env["PATH"])
    with pytest.raises(ConfigurationError, match="`FLUX_URI` must name the hosts of this job"):
        find_allocation(env)


@pytest.mark.parametrize(
    ("variable", "content"),
    [
        ("PBS_NODEFILE", None),
        ("PBS_NODEFILE", ""),
        ("PBS_NODEFILE", "-oProxyCommand=evil"),
        ("PE_HOSTFILE", "n1"),
        ("PE_HOSTFILE", "n1 four"),
    ],
)
def test_a_file_that_cannot_be_read_is_an_error(variable: str, content: str | None, tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigurationError, match=f"`{variable}` must"):
        find_allocation({variable: str(file)})


@pytest.mark.parametrize(
    "env",
    [
        {"SLURM_JOB_NODELIST": "a,b", "SLURM_TASKS_PER_NODE": "1(x3)"},
        {"SLURM_JOB_NODELIST": "n[1-x]"},
        {"LSB_MCPU_HOSTS": "hostA 4 hostB"},
    ],
)
def test_a_variable_that_cannot_be_read_is_an_error(env: Mapping[str, str]) -> None:
    with pytest.raises(ConfigurationError, match=f"`{next(iter(env))}` must name the hosts of this job"):
        find_allocation(env)


def test_lists_of_slurm() -> None:
    assert host_names("n[01-03,10],gpu1,r[1-2]c[3-4]") == [
        *("n01", "n02", "n03", "n10", "gpu1"),
        *("r1c3", "r1c4", "r2c3", "r2c4"),
    ]
    assert node_counts("4(x2),3") == [4, 4, 3]
    assert node_counts("four") is None
