"""Which tests run by default, in which worlds, and why. `pytest --all` runs every test in every world.

What a backend or a transport does itself may differ in each world. By default it runs with two ranks on each transport,
and with three on one. What is written once, above the backends, may differ with the kind of backend and with the number
of ranks alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

__all__ = ("ABOVE_THE_BACKENDS", "DEFAULT_WORLDS", "EACH_TRANSPORT", "ONLY_WITH_ALL")

DEFAULT_WORLDS = ("local-1", "torch-gloo-2", "torch-gloo-3", "horovod-gloo-2")
"""One process, both backends, and a number of ranks that is no power of two."""

EACH_TRANSPORT = (*DEFAULT_WORLDS, "torch-mpi-2", "horovod-mpi-2")
"""For the files that are not in ABOVE_THE_BACKENDS."""

ABOVE_THE_BACKENDS: Mapping[str, str] = MappingProxyType(
    {
        "behaviours/test_autograd.py": "gradients of collectives are made of collectives, which test_allreduce.py, "
        "test_allgather.py, ... test everywhere",
        "behaviours/test_average_argument.py": "an argument that is translated before a collective is called",
        "behaviours/test_backward_passes.py": "counts backward passes; test_training.py reduces gradients everywhere",
        "behaviours/test_checkpoint.py": "files, and what the ranks agree on with objects",
        "behaviours/test_checkpoint_failures.py": "files, and errors that the ranks report with objects",
        "behaviours/test_checkpointed_layers.py": "the order in which backward runs",
        "behaviours/test_comm_hooks.py": "functions that are called in a thread; test_mpi_with_torch.py and "
        "test_torch_suite.py call the process groups of the backends",
        "behaviours/test_commits.py": "files, and what the ranks agree on with objects",
        "behaviours/test_elastic.py": "states and restarts; test_lifecycle.py leaves and joins worlds everywhere",
        "behaviours/test_elastic_sampler.py": "the state of a sampler",
        "behaviours/test_elastic_state.py": "states; test_broadcast.py shares tensors everywhere",
        "behaviours/test_failed_backward.py": "the state of the reducer after an exception",
        "behaviours/test_fused_batch_norm.py": "arithmetic on what one allreduce returns",
        "behaviours/test_gradient_dtypes.py": "buckets by dtype; test_allreduce.py reduces every dtype everywhere",
        "behaviours/test_gradient_order.py": "which bucket has which gradient; test_training.py runs everywhere",
        "behaviours/test_kept_gradients.py": "the memory of gradients in one process",
        "behaviours/test_metrics.py": "arithmetic on what one allgather and one allreduce return",
        "behaviours/test_mixed_precision.py": "copies of the parameters in one process",
        "behaviours/test_objects.py": "pickled bytes; test_broadcast.py and test_allgather.py run everywhere",
        "behaviours/test_optimizer.py": "the wrapper of the optimizer in one process",
        "behaviours/test_parallel.py": "the wrapper of the module in one process",
        "behaviours/test_parallel_interface.py": "attributes and arguments of the wrapper of the module",
        "behaviours/test_parameters.py": "the order of parameters; test_broadcast.py runs everywhere",
        "behaviours/test_several_optimizers.py": "which reducer gets which gradient",
        "behaviours/test_sparse_gradients.py": "rows and values, which test_allgather.py gathers everywhere",
        "behaviours/test_sync_batch_norm.py": "arithmetic on what one allreduce returns",
        "behaviours/test_timeline.py": "events that are written above the backends",
        "behaviours/test_unpickling.py": "pickled bytes; test_broadcast.py and test_allgather.py run everywhere",
        "behaviours/test_unused_parameters.py": "zeros in buckets; test_training.py reduces buckets everywhere",
        "behaviours/test_wrong_arguments.py": "arguments that are checked before a backend is called",
        "behaviours/test_wrong_use.py": "arguments that are checked before a backend is called",
        "parity/test_training.py": "twenty steps with every feature; behaviours/test_training.py runs everywhere",
    }
)
"""Files below tests/, and what their tests are about."""

ONLY_WITH_ALL: Mapping[str, str] = MappingProxyType(
    {
        r".*\[(.*-)?(torch-mpi|horovod-gloo|horovod-mpi)-3(-.*)?\]": "three ranks run by default on torch over Gloo",
        r"behaviours/test_fused_batch_norm\.py::.*\[(local-1|torch-gloo-2)-": "three ranks run by default, and Horovod",
        r"behaviours/test_hook_threads\.py::.*-mpi-2[-\]]": "threads of one process; Gloo runs by default",
        r"behaviours/test_wrong_arguments\.py::.*\[torch-gloo-3-": "errors of three ranks are those of two",
        r"integration/test_checkpoint_kills\.py::": "launchers/test_elastic.py kills and resumes jobs by default",
        r"integration/test_installed_types\.py::": "ci/check checks the types of the package itself",
        r"integration/test_torch_suite\.py::test_results.*(over_mpi|\[3\])": "two ranks over Gloo run by default",
        r"launchers/test_bench\.py::test_(step|contestant_that_fails|interrupted_bench|collectives)": "each starts "
        "many worlds; the other tests of `dualdist bench` run by default",
        r"launchers/test_doctor_world\.py::.*\[(srun|dualdist run)\]": "torchrun and mpirun run by default",
        r"launchers/test_endings\.py::.*keeps_the_error": "test_comm_hooks.py leaves such a world by default",
        r"launchers/test_endings\.py::.*has_stopped.*(mpirun-torch|shutdown)": "another ending runs by default",
        r"launchers/test_frameworks\.py::.*(horovod\]|(fabric|ignite)-torch\]|averages|compiled|metrics)": "the "
        "frameworks call the same wrapper, on each backend; Accelerate and Lightning run by default",
        r"launchers/test_hosts\.py::.*(horovodrun with t|dualdist run with h|torchrun with h.* over)": "the same "
        "launchers with the other backend run by default",
        r"launchers/test_mpis\.py::.*(-3\]|wheel|, gloo)": "two processes of Debian's MPIs run by default",
        r"launchers/test_part_of_world\.py::.*\[(all-|reversed-|split-torch|list-horovod)": "a part of a communicator "
        "and a list of ranks run by default",
        r"launchers/test_process_sets_of_hosts\.py::.*(torch|horovodrun)": "by default, Horovod makes these sets once",
        r"launchers/test_start\.py::.*(\[torch-file-before|a_wait_after_the_start)": "the same start over TCP, and all "
        "other waits, run by default",
        r"launchers/test_stopped_process_set\.py::.*\[mpirun": "the same wait with the other controller",
        r"launchers/test_stopped_start\.py::.*\[(torch-gloo|torch-mpi-d|.*\.backends)": "a stop before init, "
        "and on Horovod one during it, run by default over MPI",
        r"launchers/test_train\.py::.*fails_alone": "the rank waits 10 s before it prints its line",
        r"parity/test_mutations\.py::.*(\[(local-1|horovod-mpi-2)-|naive.*\[(torch-mpi|horovod))": "two ranks "
        "on both backends, and three on torch, run by default",
        r"parity/test_training\.py::.*\[torch-gloo-2-": "three ranks run by default, and two on Horovod",
    }
)
"""Patterns of tests, with their files below tests/, which take long and differ little from others."""
