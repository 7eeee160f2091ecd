"""Which tests run in which worlds: `pytest -m core` runs the fewest, `pytest` more, and `pytest --all` all of them.

`--worlds NAMES` takes the place of the worlds in this table: with `--all`, every test then runs in each of them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from .helpers.world import WORLDS

__all__ = ("NEW_INTERPRETERS", "is_core", "is_left_out", "worlds_of")

BACKENDS = ("local-1", "torch-gloo-3", "horovod-gloo-2")
"""Each backend, with one, two and three ranks."""
TRANSPORTS = ("local-1", "torch-gloo-2", "torch-gloo-3", "torch-mpi-2", "horovod-gloo-2", "horovod-mpi-2")
"""Each transport of each backend with two ranks, and one with three."""

WORLDS_BY_SUBJECT = {
    # what a file is about: the worlds by default, and with --all
    "arguments": (
        ("torch-gloo-2", "horovod-gloo-2"),
        ("local-1", "torch-gloo-2", "torch-gloo-3", "horovod-gloo-2"),
    ),
    "above the backends": (BACKENDS, TRANSPORTS),
    "the backends": (TRANSPORTS, tuple(WORLDS)),
}

ARGUMENTS = "average_argument unpickling wrong_arguments wrong_use"
"""Files of behaviours whose errors and warnings arise before a backend is called."""
ABOVE_THE_BACKENDS = """
    autograd backward_passes checkpoint checkpoint_failures checkpointed_layers comm_hooks commits compile elastic
    elastic_sampler elastic_state equal_start failed_backward gradient_dtypes gradient_order
    kept_gradients losses_over_ranks metrics mixed_precision moved_gradients no_host_reads objects optimizer
    optimizer_state parallel parallel_interface parallel_state parameter_hooks parameters reduce_ops
    several_optimizers sharded_checkpoint sharded_models sparse_gradients sync_batch_norm timeline unused_parameters
"""
"""Files of behaviours that are made of collectives, which other files test on every backend."""

CORE = """
    allgather allreduce alltoall any_order broadcast checkpoint join lifecycle mismatch optimizer parallel
    process_sets reducescatter stall sync_batch_norm training
"""
"""Files of behaviours that say most. They and the matrix of launchers are what a contributor runs first."""
CORE_WORLDS = {"local-1", "torch-gloo-3", "torch-mpi-2", "horovod-gloo-2"}

NEW_INTERPRETERS = tuple(
    f"launchers/test_{name}.py"
    for name in ("matrix", "minimal", "parity_command", "run_function", "spawn", "unchanged_scripts")
)
"""Files whose processes are new interpreters with --all, as a user's are. Others start forks (helpers/forks.py)."""


ONLY_WITH_ALL = (
    # patterns of tests that take long and differ little from one that runs by default
    r".*\[(.*-)?(torch-mpi|horovod-gloo|horovod-mpi)-3(-.*)?\]",
    r"behaviours/test_checkpoint\.py::.*workers_of_a_loader.*\[(torch|horovod)-.*(spawn|forkserver)\]",
    r"behaviours/test_compile\.py::.*\[horovod-.*-(all(gather|toall)|broadcast|grouped|reduce)",
    r"behaviours/test_hook_threads\.py::.*-mpi-2[-\]]",
    r"integration/test_((sharded_)?checkpoint_kills|deaths|installed)\.py",
    r"integration/test_torch_suite\.py::test_results.*(over_mpi|\[3\])",
    r"launchers/test_bench\.py::test_(step|contestant_that_fails|interrupted_bench|collectives)",
    r"launchers/test_checkpoint\.py::.*(requeued.*\[dualdist run\]|saved_run.*(all but|all-10|launcher-15))",
    r"launchers/test_doctor_world\.py::.*\[(srun|dualdist run)\]",
    r"launchers/test_endings\.py::.*(keeps_the_error|has_stopped.*(mpirun-torch|shutdown))",
    r"launchers/test_examples\.py::.*\[mpirun\]",
    r"launchers/test_exec\.py::test_a_script_for_torchrun.*\[(horovodrun|dualdist run|.*variables)\]",
    r"launchers/test_frameworks\.py::.*(horovod\]|(fabric|ignite)-torch\]|averages|compiled|metrics)",
    r"launchers/test_hosts\.py::.*(horovodrun with t|dualdist run with h|torchrun with h.* over)",
    r"launchers/test_mpis\.py::.*(-3\]|wheel|, gloo)",
    r"launchers/test_page_blocks\.py::.*\[(DUALDIST_S|sbatch --r|srun --k|torchrun .*(compat|restarts))",
    r"launchers/test_parity_command\.py::.*(hangs.*@(run|mpirun)\]|three_ranks.*@mpirun\])",
    r"launchers/test_part_of_world\.py::.*\[(all-|reversed-|split-torch|list-horovod)",
    r"launchers/test_process_sets_of_hosts\.py::.*(torch|horovodrun)",
    r"launchers/test_sharding\.py::.*\[(srun|mpirun|horovod-mpi|fabric|False)",
    r"launchers/test_sharding\.py::.*\[(torch-mpi|horovod-gloo)-(hybrid|replicated|tensor_parallel\]|with_shared)",
    r"launchers/test_start\.py::.*(\[torch-file-before|a_wait_after_the_start)",
    r"launchers/test_stopped_process_set\.py::.*\[mpirun",
    r"launchers/test_stopped_start\.py::.*\[(torch-gloo|torch-mpi-d|.*\.backends)",
    r"parity/test_mutations\.py::.*(\[local-1-|naive.*\[horovod|\[horovod.*-module\])",
)


def _files(names: str) -> set[str]:
    return {f"behaviours/test_{name}.py" for name in names.split()}


_SUBJECTS = {
    **dict.fromkeys(_files(ARGUMENTS), "arguments"),
    **dict.fromkeys(_files(ABOVE_THE_BACKENDS), "above the backends"),
    "parity/test_mutations.py": "above the backends",
    "parity/test_training.py": "above the backends",
}
_CORE_FILES = _files(CORE) | {"launchers/test_matrix.py"}


def worlds_of(file: str, fitting: Sequence[str], everything: bool) -> list[str]:
    """Return the worlds for a test of a file below tests/: the usual ones that fit, at least one of each usual backend.

    fitting: the worlds with the kinds and numbers of ranks that the test is about. everything: with --all.
    """
    usual = WORLDS_BY_SUBJECT[_SUBJECTS.get(file, "the backends")][everything]
    chosen = [world for world in fitting if world in usual]
    for world in fitting:
        if _backend(world) in map(_backend, usual) and _backend(world) not in map(_backend, chosen):
            chosen.append(world)
    return chosen


def _backend(world: str) -> str:
    return world.partition("-")[0]


def is_core(file: str, world: str | None) -> bool:
    """Return whether the tests of a file below tests/ are core tests in a world; None: they are about no world."""
    return file in _CORE_FILES and (world is None or world in CORE_WORLDS)


def is_left_out(test: str) -> bool:
    """Return whether a test below tests/ runs only with --all, unless the command line names its file."""
    return any(re.match(pattern, test) for pattern in ONLY_WITH_ALL)
