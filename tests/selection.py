"""Which tests run in which worlds.

`pytest -m core` runs the fewest, and `pytest` those of `ci/test`: every behaviour on each backend, each launcher with
each backend. `pytest --rest` runs what `.ci/run` adds to them, and `pytest --all` all tests there are.

`--worlds NAMES` takes the place of the worlds in this table: with `--all`, every test then runs in each of them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import IntEnum

from .helpers.world import WORLDS

__all__ = ("NEW_INTERPRETERS", "Suite", "is_core", "suite_of", "worlds_of")


class Suite(IntEnum):
    """The suites, each of which contains the one before it."""

    FIRST = 0
    """`ci/test`"""
    CI = 1
    """`.ci/run`"""
    ALL = 2


BACKENDS = ("local-1", "torch-gloo-3", "horovod-gloo-2")
"""Each backend, with one, two and three ranks."""
TRANSPORTS = ("local-1", "torch-gloo-2", "torch-gloo-3", "torch-mpi-2", "horovod-gloo-2", "horovod-mpi-2")
"""Each transport of each backend with two ranks, and one with three."""

WORLDS_BY_SUBJECT = {
    # what a file is about: the worlds in each suite
    "arguments": (
        ("torch-gloo-3",),
        ("torch-gloo-3", "horovod-gloo-2"),
        ("local-1", "torch-gloo-2", "torch-gloo-3", "horovod-gloo-2"),
    ),
    "above the backends": (BACKENDS, BACKENDS, TRANSPORTS),
    "the backends": (BACKENDS, TRANSPORTS, tuple(WORLDS)),
}

ARGUMENTS = "average_argument unpickling wrong_arguments wrong_init wrong_use"
"""Files of behaviours whose errors and warnings arise before a backend is called."""
ABOVE_THE_BACKENDS = """
    autograd backward_passes checkpoint checkpoint_failures checkpointed_layers comm_hooks commits compile elastic
    elastic_sampler elastic_state equal_start failed_backward gradient_dtypes gradient_order
    kept_gradients losses_over_ranks metrics mixed_precision moved_gradients no_host_reads objects optimizer
    optimizer_state parallel parallel_interface parallel_state parameter_hooks parameters reduce_ops replicas report
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
    for name in """
        checkpoint compat doctor exec matrix minimal parity_command run_function spawn unchanged_scripts
    """.split()
)
"""Files whose processes are new interpreters with --all, as a user's are. Others start forks (helpers/forks.py)."""


ONLY_WITH_ALL = (
    # patterns of tests that take long and differ little from one that runs by default
    r".*\[(.*-)?(torch-mpi|horovod-gloo|horovod-mpi)-3(-.*)?\]",
    r"behaviours/test_compile\.py::.*\[horovod-.*-(all(gather|toall)|broadcast|grouped|reduce)",
    r"behaviours/test_hook_threads\.py::.*-mpi-2[-\]]",
    r"integration/test_((sharded_)?checkpoint_kills|deaths|installed)\.py",
    r"integration/test_torch_suite\.py::test_results.*(over_mpi|\[3\])",
    r"launchers/test_bench\.py::test_(step|contestant_that_fails|interrupted_bench|collectives)",
    r"launchers/test_checkpoint\.py::.*(requeued.*\[dualdist run\]|saved_run.*(all but|all-10|launcher-15))",
    r"launchers/test_doctor_world\.py::.*\[(srun|dualdist run)\]",
    r"launchers/test_endings\.py::.*(keeps_the_error|has_stopped.*(mpirun-torch|shutdown))",
    r"launchers/test_examples\.py::.*\[mpirun\]",
    r"launchers/test_exec\.py::.*\[dualdist exec-(horovodrun|dualdist run|.*variables)\]",
    r"launchers/test_frameworks\.py::.*(horovod\]|(fabric|ignite)-torch\]|averages|compiled|metrics)",
    r"launchers/test_hosts\.py::.*(horovodrun with t|dualdist run with h|torchrun with h.* over)",
    r"launchers/test_mpis\.py::.*(-3\]|wheel|, gloo)",
    r"launchers/test_page_blocks\.py::.*\[(DUALDIST_S|sbatch --r|srun --k|torchrun .*(compat|restarts))",
    r"launchers/test_parity_command\.py::.*three_ranks.*@mpirun\]",
    r"launchers/test_part_of_world\.py::.*\[horovod-(members-(list|all|reversed)|sets-(reversed|list))\]",
    r"launchers/test_process_sets_of_hosts\.py::.*\[.*(torch|horovodrun)",
    r"launchers/test_sharding\.py::.*\[(srun|mpirun|horovod-mpi|fabric|False)",
    r"launchers/test_sharding\.py::.*\[(torch-mpi|horovod-gloo)-(hybrid|replicated|tensor_parallel\]|with_shared)",
    r"launchers/test_start\.py::.*(\[torch-file-before|a_wait_after_the_start)",
    r"launchers/test_stopped_process_set\.py::.*\[mpirun",
    r"launchers/test_stopped_start\.py::.*\[(torch-gloo|torch-mpi-d|.*\.backends)",
    r"parity/test_mutations\.py::.*(\[local-1-|\[horovod.*-module\])",
)

NOT_IN_FIRST = (
    # patterns of tests that ci/test leaves out
    r"behaviours/test_compile\.py::.*may_call_collectives\[.*-(alltoall|broadcast|grouped|reducescatter)",
    r"behaviours/test_gradient_order\.py::.*failed_is_repeated\[horovod-gloo-2-[234]",
    r"behaviours/test_optimizer\.py::.*combine_a_gradient_twice_are_refused\[horovod-.*options[123]",
    r"behaviours/test_parameter_hooks\.py::.*removes_all_hooks\[horovod-gloo-2-.*-(dict|none)",
    r"behaviours/test_sharded_checkpoint\.py::(?!.*_resumed_).*\[horovod-",
    r"behaviours/test_sharded_checkpoint\.py::.*(takes_no_step.*(local|-0\])|folder_of_another.*-True)",
    r"integration/test_mpi_alone\.py::.*(one_at_a_time|many.worlds|\[callback\]|\[excepthook\]|installed_package)",
    r"integration/test_torch_suite\.py::test_results",
    r"launchers/test_checkpoint\.py::.*(\[(mpirun|horovodrun)\]|dualdist_run.*\[(?!all-15)|step_of_slurm|requeued)",
    r"launchers/test_cluster_examples\.py::.*\[(slurm|slurm_torchrun|lsf)\.(sbatch|sh)\]",
    r"launchers/test_compat\.py::.*(\[(torchrun-horovod|mpirun.*)\]|two_hosts)",
    r"launchers/test_default_group\.py::.*\[(torchrun-horovod|horovodrun|mpirun.*)\]",
    r"launchers/test_doctor\.py::.*mpich",
    r"launchers/test_doctor_world\.py::.*(slow_link|sound_world|arrives)",
    r"launchers/test_elastic\.py::.*(kill|two_agents)",
    r"launchers/test_endings\.py::.*(reported_once|without_an_exception).*\[(torchrun-horovod|mpirun.*)\]",
    r"launchers/test_endings\.py::.*(\[horovodrun\]|waits--6|has_stopped|mpirun_returns)",
    r"launchers/test_examples\.py::.*(mnist|cifar|download|imagenet|benchmark)",
    r"launchers/test_exec\.py::.*(two_(hosts|nodes)|of_slurm|lightning|its_host|mpiexec|pmix|another_host|compat)",
    r"launchers/test_exec\.py::.*\[(dualdist exec-(PMIx|mpiexec|horovodrun|flux|PALS)|dualdist://-(?!mpirun))",
    r"launchers/test_exec\.py::.*(each_other|at_the_same_time|init_without_mpi4py|\[dualdist run-from dualdist import)",
    r"launchers/test_frameworks\.py",
    r"launchers/test_horovod_build\.py::.*waits_for_another_rank\[mpirun\]",
    r"launchers/test_hosts\.py::.*\[",
    r"launchers/test_migrate\.py::.*(\[(?!torchrun_tutorial)|stays_as_it_is)",
    r"launchers/test_migrated_examples\.py::.*\[(with_horovod|with_mpi4py)",
    r"launchers/test_mpis\.py",
    r"launchers/test_notebook\.py::.*train_on_two",
    r"launchers/test_parity_command\.py::.*begins_and_named\[(?!lr|params)",
    r"launchers/test_parity_command\.py::.*(hides_in_a|ddp_does_not|rounding|three_ranks|whole_batch|other_collectives)",
    r"launchers/test_parity_command\.py::.*(bit_for_bit\[(?!horovod)|own\[(?!horovod)|cannot_run|both_losses|hangs.*\[(?!torch.gloo@torchrun))",
    r"launchers/test_part_of_world\.py::.*\[horovod-",
    r"launchers/test_run\.py::.*(closed_are_empty\[(?!<&-.>&-.2)|agent_that_is_killed.*\[(?!11-hostA)|launcher_ends_every.*\[(?!15)|fork_for_ever\[localhost|lacks)",
    r"launchers/test_run_function\.py::.*own_functions",
    r"launchers/test_sharding\.py::.*(one_process|another_mesh|another_package|example)",
    r"launchers/test_shared_memory_hosts\.py::.*(mpi|no_memory|killed|alpha:2,beta:1)",
    r"launchers/test_slurm_steps\.py::.*(mpich|\[none|\[pmi2|never_arrives)",
    r"launchers/test_start\.py::.*\[horovod-.*(connect|arrive)",
    r"launchers/test_start_with\.py::.*(mpirun|any_length|survives|reached_is)",
    r"launchers/test_stopped_process_set\.py::.*\[(torchrun-horovod|mpirun)",
    r"launchers/test_stopped_start\.py",
    r"launchers/test_train\.py::.*(every_launcher|metrics_say|run_learns)",
    r"launchers/test_train_flags\.py",
    r"launchers/test_unchanged_scripts\.py::.*(fabric|\[(localhost:1|hostA))",
    r"launchers/test_variables\.py::.*\[torchrun-horovod",
    r"parity/test_mutations\.py::.*\[horovod",
    r"parity/test_programs\.py::.*\[(torch-gloo-2|horovod-mpi-2)\]",
    r"parity/test_rounding\.py",
    r"parity/test_training\.py::.*\[(torch-gloo-3-.*float32|horovod-gloo-2-.*float64)\]",
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


def worlds_of(file: str, fitting: Sequence[str], suite: Suite) -> list[str]:
    """Return the worlds for a test of a file below tests/: the usual ones that fit, at least one of each usual backend.

    fitting: the worlds with the kinds and numbers of ranks that the test is about.
    """
    usual = WORLDS_BY_SUBJECT[_SUBJECTS.get(file, "the backends")][suite]
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


def suite_of(test: str) -> Suite:
    """Return the first suite that a test below tests/ belongs to, by its name alone."""
    for suite, patterns in ((Suite.ALL, ONLY_WITH_ALL), (Suite.CI, NOT_IN_FIRST)):
        if any(re.match(pattern, test) for pattern in patterns):
            return suite
    return Suite.FIRST
