"""Which tests run in which worlds, and in which suite.

`pytest -m core` runs the fewest, and `pytest` those of `ci/test`: every behaviour on each backend, each launcher with
each backend. `pytest --rest` runs what `.ci/run` adds to them, and `pytest --all` all tests there are.

A test that takes long and differs little from one of `ci/test` has a mark: `only_ci` leaves it to `.ci/run`, `only_all`
to `pytest --all`. `where=`, a function of some parameters of the test by their names, says for which values.

`--worlds NAMES` takes the place of the worlds in this table: with `--all`, every test then runs in each of them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from enum import IntEnum

import pytest

from .helpers.time_table import IN_WORLD
from .helpers.world import WORLDS


class Suite(IntEnum):
    """The suites, each of which contains the one before it."""

    FIRST = 0
    """`ci/test`"""
    CI = 1
    """`.ci/run`"""
    ALL = 2
    NONE = 3
    """What cannot run."""


MARKS = {"only_ci": Suite.CI, "only_all": Suite.ALL, "not_on_devices": Suite.NONE}
"""The marks of tests, files and parameters that are left to a later suite. All others are in the first one.

`not_on_devices` only has an effect in worlds of the simulated accelerator: its tests make tensors on the CPU, or need
operators that it lacks."""

BACKENDS = ("local-1", "torch-gloo-3", "horovod-gloo-2")
"""Each backend, with one, two and three ranks."""
TWO_RANKS = ("local-1", "torch-gloo-2", "horovod-gloo-2")
"""Each backend, with at most two ranks: three take half as long again."""
TRANSPORTS = ("local-1", "torch-gloo-2", "torch-gloo-3", "torch-mpi-2", "horovod-gloo-2", "horovod-mpi-2")
"""Each transport of each backend with two ranks, and one with three."""

DEVICES = (("npu-hccl-3", "npu-gloo-2"),) * 2 + (tuple(name for name in WORLDS if name.startswith("npu")),)
"""The worlds of the simulated accelerator, in each suite: over its transport, and through the memory of the host."""
PROCESSORS = tuple(name for name in WORLDS if not name.startswith("npu"))

WORLDS_BY_SUBJECT = {
    # what a file is about: the worlds in each suite
    "arguments": (
        ("torch-gloo-3",),
        ("torch-gloo-3", "horovod-gloo-2"),
        ("local-1", "torch-gloo-2", "torch-gloo-3", "horovod-gloo-2"),
    ),
    "above the backends": (TWO_RANKS, BACKENDS, TRANSPORTS),
    "the backends": (BACKENDS, TRANSPORTS, PROCESSORS),
    "streams": DEVICES,
}

ARGUMENTS = "average_argument unpickling wrong_arguments wrong_init wrong_use"
"""Files of behaviours whose errors and warnings arise before a backend is called."""
ABOVE_THE_BACKENDS = """
    autograd backward_passes checkpoint checkpoint_failures checkpointed_layers comm_hooks commits compile elastic
    elastic_sampler elastic_state equal_start failed_backward gradient_dtypes gradient_order
    kept_gradients losses_over_ranks metrics mixed_precision moved_gradients no_host_reads objects optimizer
    optimizer_state overlap parallel parallel_interface parallel_state parameter_hooks parameters reduce_ops replicas
    report several_optimizers sharded_checkpoint sharded_models sparse_gradients sync_batch_norm timeline
    unused_parameters
"""
"""Files of behaviours that are made of collectives, which other files test on every backend."""
ON_DEVICES = """
    backward_passes failed_backward gradient_order kept_gradients parallel sync_batch_norm training
"""
"""Files of behaviours that run on the simulated accelerator, too: their tensors are on torch's default device."""

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


def _files(names: str) -> set[str]:
    return {f"behaviours/test_{name}.py" for name in names.split()}


_SUBJECTS = {
    **dict.fromkeys(_files(ARGUMENTS), "arguments"),
    **dict.fromkeys(_files(ABOVE_THE_BACKENDS), "above the backends"),
    "behaviours/test_streams.py": "streams",
    "parity/test_mutations.py": "above the backends",
    "parity/test_training.py": "above the backends",
}
_ON_DEVICES = _files(ON_DEVICES)
_CORE_FILES = _files(CORE) | {"launchers/test_matrix.py"}


def worlds_of(file: str, fitting: Sequence[str], suite: Suite) -> list[str]:
    """Return the worlds for a test of a file below tests/: the usual ones that fit, at least one of each usual backend.

    fitting: the worlds with the kinds and numbers of ranks that the test is about.
    """
    usual = WORLDS_BY_SUBJECT[_SUBJECTS.get(file, "the backends")][suite]
    if file in _ON_DEVICES and suite is not Suite.FIRST:
        usual += DEVICES[suite]
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


def suite_of(item: pytest.Item) -> Suite:
    """Return the first suite that a test belongs to, by its marks and its world."""
    params = item.callspec.params if hasattr(item, "callspec") else {}

    def holds(where: Callable[..., object] = lambda: True) -> bool:
        return bool(where(*(params[name] for name in inspect.signature(where).parameters)))

    world = IN_WORLD.search(item.nodeid)
    is_on_device = world is not None and world[1] in DEVICES[Suite.ALL]
    suites = [Suite.FIRST if world is None or world[1] in (*TRANSPORTS, *DEVICES[Suite.FIRST]) else Suite.ALL]
    for name, suite in MARKS.items():
        if suite is not Suite.NONE or is_on_device:
            suites += [suite for mark in item.iter_markers(name) if holds(**mark.kwargs)]
    return max(suites)
