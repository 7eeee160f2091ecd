"""The core works without each other part of the package, and an error names the part that is missing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import dualdist

from ..helpers.world import ROOT

PACKAGE = Path(dualdist.__file__).parent
CORE = {"__init__", "__main__", "core", "errors"}
PARTS = sorted(
    {entry.stem for entry in PACKAGE.iterdir() if entry.suffix == ".py" or (entry / "__init__.py").exists()} - CORE
)
NAMES = {
    "built": {
        *("ccl_built", "cuda_built", "ddl_built", "gloo_built", "gloo_enabled", "mpi_built", "mpi_enabled"),
        *("mpi_threads_supported", "nccl_built", "rocm_built"),
    },
    "checkpoint": {"checkpoint", "elastic"},
    "comm_hooks": {"CommHookState"},
    "copies": {"run", "spawn"},  # whose processes get them
    "devices": {"CommHookState"},
    "elastic": {"elastic"},
    "lr": {"lr"},
    "metrics": {"metrics"},
    "observation": {"report", "start_timeline", "stop_timeline"},
    "other_launchers": {"run", "spawn"},  # whose processes get none of their variables
    "processes": {"run", "spawn"},
    "replicas": {"check_replicas"},
    "rooted_collectives": {
        *("gather", "gather_object", "reduce", "scatter", "scatter_object"),
        *("checkpoint", "elastic"),  # which collect states of ranks on rank 0
    },
    "samplers": {"DistributedSampler", "elastic", "samplers", "split_by_rank"},
    "seeding": {"seed_everything", "seeding"},
    "sharding": {"device_mesh"},
    "slurm": {"run", "spawn"},  # which read its lists of hosts
    "sparse_allreduce": {"sparse_allreduce_async"},
    "sync_batch_norm": {"SyncBatchNorm"},
    "torch_ddp": {"DistributedDataParallel"},
}
"""The public names that are missing without a part."""


@pytest.fixture(scope="module")
def lacking() -> dict[str, list[str] | None]:
    """Return, for each part, the public names that are missing without it; None if training failed."""
    command = [sys.executable, str(ROOT / "tests" / "helpers" / "taken_off.py"), *PARTS]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=250, check=False)
    sys.stderr.write(ended.stderr)
    return dict(map(json.loads, ended.stdout.splitlines()))


@pytest.mark.only_ci
@pytest.mark.parametrize("part", PARTS)
def test_a_world_of_one_trains_without(part: str, lacking: dict[str, list[str] | None]) -> None:
    names = lacking[part]
    assert names is not None
    assert set(names) == NAMES.get(part, set())
