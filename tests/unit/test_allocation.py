"""The hosts of a job, from the variables and files of resource managers as their manuals describe them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from dualdist.errors import ConfigurationError
from dualdist.processes.hosts import find_allocation
from dualdist.slurm import host_names, node_counts

SLURM = {"SLURM_JOB_NODELIST": "node[07-08,20]", "SLURM_JOB_CPUS_PER_NODE": "64(x3)"}


def hosts(env: Mapping[str, str]) -> dict[str, int]:
    variable, found = find_allocation(env)
    assert variable in env
    return {host.name: host.slots for host in found}


def test_outside_a_job_there_is_none() -> None:
    assert find_allocation({"HOME": "/root", "PBS_NODEFILE": ""}) == ("", [])


def test_slurm_gives_the_tasks_of_each_node_else_its_cpus() -> None:
    assert hosts({**SLURM, "SLURM_TASKS_PER_NODE": "4(x2),3"}) == {"node07": 4, "node08": 4, "node20": 3}
    assert hosts(SLURM) == {"node07": 64, "node08": 64, "node20": 64}
    assert hosts({"SLURM_JOB_NODELIST": "a,b"}) == {"a": 1, "b": 1}


@pytest.mark.parametrize("variable", ["PBS_NODEFILE", "LSB_DJOB_HOSTFILE", "COBALT_NODEFILE"])
def test_a_file_with_a_line_for_each_slot(variable: str, tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("n1\nn1\nn2\nn1\n")
    assert hosts({variable: str(file)}) == {"n1": 3, "n2": 1}


def test_pairs_of_hosts_and_slots_of_lsf_and_grid_engine(tmp_path: Path) -> None:
    assert hosts({"LSB_MCPU_HOSTS": "hostA 4 hostB 2 "}) == {"hostA": 4, "hostB": 2}
    file = tmp_path / "hosts"
    file.write_text("n1.site 4 all.q@n1.site UNDEFINED\nn2.site 2 all.q@n2.site <NULL>\n")
    assert hosts({"PE_HOSTFILE": str(file)}) == {"n1.site": 4, "n2.site": 2}


Flux = Callable[[str], dict[str, str]]


@pytest.fixture
def flux(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Flux:
    """Returns the environment of a Flux instance, with a script as its command, which has no package here."""

    def made(script: str) -> dict[str, str]:
        file = tmp_path / "flux"
        file.write_text(f"#!/bin/sh\n{script}\n")
        file.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
        return {"FLUX_URI": "local:///run/flux/local", "PATH": f"{tmp_path}:/usr/bin:/bin"}

    return made


def test_flux_gives_the_cores_of_each_node(flux: Flux) -> None:
    # Three nodes in the form that flux/resource/Rv1Set.py (flux-python 0.88) writes.
    resources = (
        '{"version": 1, "execution": {"R_lite": [{"rank": "0-1", "children": {"core": "0-7", "gpu": "0"}}, '
        '{"rank": "3", "children": {"core": "0-1,4"}}], "starttime": 0.0, "expiration": 0.0, '
        '"nodelist": ["tux[07-08],gpu1"]}}'
    )
    env = flux(f"test \"$*\" = 'resource R' && echo '{resources}'")
    assert hosts(env) == {"tux07": 8, "tux08": 8, "gpu1": 3}


@pytest.mark.parametrize("script", ["echo no broker >&2; exit 1", "echo '{}'", "echo nothing"])
def test_flux_without_resources_is_an_error(script: str, flux: Flux) -> None:
    with pytest.raises(ConfigurationError, match="`FLUX_URI` must name the hosts of this job"):
        find_allocation(flux(script))


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
    assert host_names("n[01-03,10],gpu1,r[1-2]c[3-4]") == "n01 n02 n03 n10 gpu1 r1c3 r1c4 r2c3 r2c4".split()
    assert host_names("gpu-[3,5-6]-ib,a-b.example.org") == "gpu-3-ib gpu-5-ib gpu-6-ib a-b.example.org".split()
    assert node_counts("4(x2),3") == [4, 4, 3]
    assert node_counts("four") is None
