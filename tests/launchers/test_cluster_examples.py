"""The files of examples/cluster: the batch scripts run under Slurm, the manifests start what they mean to."""

from __future__ import annotations

import argparse
import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ..helpers.forks import fork_variables, forked
from ..helpers.slurm_cluster import Slurm
from ..helpers.world import ROOT

CLUSTER = ROOT / "examples" / "cluster"


@pytest.mark.parametrize("script", ["slurm.sbatch", "slurm_torchrun.sbatch"])
def test_a_batch_script_trains_on_two_nodes(script: str, slurm: Slurm, tmp_path: Path) -> None:
    log, metrics = tmp_path / "log", tmp_path / "metrics.json"
    # The nodes' names are Slurm's alone: both are this host.
    variables = {"PYTHON": forked([sys.executable])[0], "PYTHONPATH": str(ROOT), **fork_variables()}
    variables |= {"HEAD": "127.0.0.1", "PORT": str(slurm.free_port())}
    ended = slurm.finish(
        "sbatch",
        "--wait",
        f"--output={log}",
        str(CLUSTER / script),
        "--epochs",
        "1",
        "--metrics",
        str(metrics),
        environment=variables,
    )
    assert ended.code == 0, f"{ended.output}\n{log.read_text()}\n{slurm.logs()}"
    launcher = "srun" if script == "slurm.sbatch" else "torchrun"
    for words in (f'"launcher": "{launcher}"', '"world_size": 4'):
        assert words in metrics.read_text()


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
