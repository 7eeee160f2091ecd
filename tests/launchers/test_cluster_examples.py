"""The files of examples/cluster: batch scripts train, under Slurm or on this host, and manifests are right."""

from __future__ import annotations

import argparse
import importlib
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ..helpers.forks import fork_variables, forked
from ..helpers.requirements import need_modules
from ..helpers.script_launch import finish
from ..helpers.slurm_cluster import Slurm
from ..helpers.world import ROOT

CLUSTER = ROOT / "examples" / "cluster"


@pytest.mark.only_ci
@pytest.mark.parametrize("script", ["slurm.sbatch", "slurm_torchrun.sbatch"])
def test_a_batch_script_trains_on_two_nodes(script: str, slurm: Slurm, tmp_path: Path) -> None:
    log, metrics = tmp_path / "log", tmp_path / "metrics.json"
    # The nodes' names are Slurm's alone: both are this host.
    variables = {"PYTHON": forked([sys.executable])[0], "PYTHONPATH": str(ROOT), **fork_variables()}
    variables |= {"HEAD": "127.0.0.1", "PORT": str(slurm.free_port())}
    command = f"sbatch --wait --output={log} {CLUSTER / script} --epochs 1 --metrics {metrics}"
    slurm.finish(*command.split(), environment=variables).check()
    launcher = "srun" if script == "slurm.sbatch" else "torchrun"
    for words in (f'"launcher": "{launcher}"', '"world_size": 4'):
        assert words in metrics.read_text()


HOST_FILES = {"pbs.sh": "PBS_NODEFILE", "lsf.sh": "LSB_DJOB_HOSTFILE"}


@pytest.mark.only_ci
@pytest.mark.parametrize("script", HOST_FILES)
def test_a_batch_script_trains_on_the_hosts_of_the_job(script: str, tmp_path: Path) -> None:
    hosts, metrics = tmp_path / "hosts", tmp_path / "metrics.json"
    hosts.write_text("localhost\nlocalhost\n")
    variables = {HOST_FILES[script]: str(hosts), "ARGUMENTS": f"--epochs 1 --metrics {metrics}"}
    variables |= {"PYTHON": forked([sys.executable])[0], "PYTHONPATH": str(ROOT)}
    output = finish([str(CLUSTER / script)], variables).check()
    assert f"dualdist run: the hosts are localhost:2, from {HOST_FILES[script]}." in output
    for words in ('"launcher": "dualdist run"', '"world_size": 2'):
        assert words in metrics.read_text()


OPTIONS = {
    "pbs.sh": ("#PBS ", "-N -l -j"),  # qsub(1B) of OpenPBS
    "lsf.sh": ("#BSUB ", "-J -n -R -W -o -gpu"),  # IBM LSF, bsub
    # flux-batch(1)
    "flux.sh": ("#flux: ", "--job-name --nodes --nslots --cores-per-slot --gpus-per-slot --time-limit"),
}
"""Batch script -> what its options start with, and the options that exist, of those that take a value."""


@pytest.mark.parametrize("script", OPTIONS)
def test_a_batch_script_has_options_that_exist(script: str) -> None:
    mark, known = OPTIONS[script]
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for option in known.split():
        parser.add_argument(option, required=option not in ("-gpu", "--gpus-per-slot"))
    lines = (CLUSTER / script).read_text().splitlines()
    given = [line.removeprefix(mark) for line in lines if line.startswith(mark)]
    parser.parse_args([word for line in given for word in shlex.split(line)])
    # Batch systems stop reading options at the first command.
    assert all(line.startswith("#") for line in lines[: 1 + lines.index(f"{mark}{given[-1]}")])


def test_the_flux_script_starts_a_task_in_every_slot(tmp_path: Path) -> None:
    flux = tmp_path / "flux"
    flux.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    flux.chmod(0o755)
    ended = finish(
        [str(CLUSTER / "flux.sh"), "--epochs", "2"], {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHON": "python"}
    )
    run, *options = ended.output.split()
    # flux-run(1)
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for option in ("--nodes", "--ntasks", "--cores-per-task"):
        parser.add_argument(option, type=int)
    parser.add_argument("program", nargs=argparse.REMAINDER)
    started = parser.parse_args(options)
    text = (CLUSTER / "flux.sh").read_text()
    assert (ended.code, run, started.program[0]) == (0, "run", "python")
    assert f"--nodes={started.nodes}\n" in text and f"--nslots={started.ntasks}\n" in text
    assert _is_example(started.program[1], started.program[2:])


def test_two_hosts_sh_names_its_launchers() -> None:
    done = subprocess.run(
        [CLUSTER / "two_hosts.sh", "carrier-pigeon", "a", "b"], capture_output=True, text=True, timeout=20
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "LAUNCHER must be run, mpirun or torchrun, but is carrier-pigeon instead." in done.stderr


def _manifest(name: str) -> Any:
    pytest.importorskip("yaml", reason="PyYAML is not installed; it comes with Horovod")
    return importlib.import_module("yaml").safe_load((CLUSTER / name).read_text())


def test_the_pytorchjob_starts_torchrun_in_every_replica() -> None:
    from torch.distributed.run import get_args_parser

    job = _manifest("pytorchjob.yaml")
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert {name: replica["replicas"] for name, replica in replicas.items()} == {"Master": 1, "Worker": 2}
    for replica in replicas.values():
        (container,) = replica["template"]["spec"]["containers"]
        assert container["name"] == "pytorch"
        assert container["command"][0] == "torchrun"
        started = get_args_parser().parse_args([*container["command"][1:], *container["args"]])
        assert _is_example(started.training_script, started.training_script_args)


def test_the_trainjob_starts_torchrun_in_every_pod() -> None:
    from torch.distributed.run import get_args_parser

    need_modules("kubeflow_trainer_api")
    manifest = _manifest("trainjob.yaml")
    job = importlib.import_module("kubeflow_trainer_api.models").TrainerV1alpha1TrainJob.from_dict(manifest)
    # The models drop fields that they do not know.
    assert job.to_dict() == manifest
    assert (job.api_version, job.kind) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
    assert job.spec.runtime_ref.name == "torch-distributed"
    trainer = job.spec.trainer
    assert (trainer.num_nodes, trainer.num_proc_per_node, trainer.command[0]) == (2, 2, "torchrun")
    started = get_args_parser().parse_args([*trainer.command[1:], *trainer.args])
    assert _is_example(started.training_script, started.training_script_args)


def test_the_mpijob_starts_a_process_in_every_slot() -> None:
    job = _manifest("mpijob.yaml")
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v2beta1", "MPIJob")
    replicas = job["spec"]["mpiReplicaSpecs"]
    (launcher,) = replicas["Launcher"]["template"]["spec"]["containers"]
    assert launcher["command"] == ["mpirun"]
    mpirun = argparse.ArgumentParser()
    mpirun.add_argument("--allow-run-as-root", action="store_true")
    mpirun.add_argument("--bind-to")
    mpirun.add_argument("-np", type=int)
    mpirun.add_argument("-x", action="append")
    mpirun.add_argument("--mca", nargs=2)
    mpirun.add_argument("program", nargs=argparse.REMAINDER)
    started = mpirun.parse_args(launcher["args"])
    assert started.np == job["spec"]["slotsPerWorker"] * replicas["Worker"]["replicas"]
    assert started.program[0] == "python"
    assert _is_example(started.program[1], started.program[2:])


def _is_example(script: str, options: list[str]) -> bool:
    return (ROOT / script).is_file() and options == ["--epochs", "2"]
