"""A rank that runs torch's own tests over the MPI process group, in step with the others. torch_suite.py starts it.

    torch_suite_mpi.py [--own] [TEST ...]    # --own: with torch's own class, not with dualdist's

MPI cannot be started in a process that is forked from one that uses it, so one process runs all tests, each in a new
default group and in a new world of dualdist. The ranks exchange their results through a store.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import unittest
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2]))
import dualdist as hvd
import dualdist.mpi.transport
from tests.helpers.cpu_in_place_of_gpu import use_cpu
from tests.integration import torch_suite

TIMEOUT_SECONDS = 20
"""How long a rank waits for the others, in a collective and after a test."""

TOO_LONG = ("test_ddp_apply_optim_in_backward", "test_ddp_apply_optim_in_backward_grad_as_bucket_view_false")
"""Tests that train a ResNet-50, which takes minutes on a CPU. Nothing here ends a test that takes long."""


def main(names: Sequence[str], own: bool) -> None:
    """Run the tests. Rank 0 prints their results. own: with torch's own DistributedDataParallel."""
    distributed_test = torch_suite.imported_suite()
    rank, size = (int(os.environ[f"OMPI_COMM_WORLD_{name}"]) for name in ("RANK", "SIZE"))
    store = dist.FileStore(str(Path(os.environ["TEMP_DIR"]) / "results"), size)
    store.set_timeout(timedelta(seconds=10 * TIMEOUT_SECONDS))
    use_cpu()
    torch_suite.substitute(distributed_test, own)
    case = lockstep_case(distributed_test, rank)
    default = torch_suite.names_of_tests(case, only_ddp=not own)
    for number, name in enumerate(names or [name for name in default if own or name not in TOO_LONG]):
        group_store = dist.PrefixStore(f"group {number}", store)
        timeout = timedelta(seconds=TIMEOUT_SECONDS)
        dist.init_process_group(
            dualdist.mpi.transport.NAME, store=group_store, rank=rank, world_size=size, timeout=timeout
        )
        if not own:
            hvd.init(transport="mpi")
        distributed_test.Barrier.barrier_id = 1000 * number
        dist.set_debug_level(dist.DebugLevel.OFF)  # tests leave another one, which changes torch's errors
        result = unittest.TestResult()
        with (
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
            mock.patch.object(sys, "exit", skip),
        ):
            case(name).run(result)
        store.set(f"result {number}.{rank}", torch_suite.outcome(result))
        found = [store.get(f"result {number}.{member}").decode() for member in range(size)]
        hvd.shutdown()
        if dist.is_initialized():
            dist.distributed_c10d._abort_process_group()
        if rank == 0:
            worst = [text for text in found if text not in ("passed", "skipped")]
            print(f"{name}: {(worst or found)[0]}", flush=True)


def skip(code: object) -> NoReturn:
    """Skip a test in place of torch's decorators, which end its process with a code."""
    raise unittest.SkipTest(str(code))


def lockstep_case(distributed_test: Any, rank: int) -> type[unittest.TestCase]:
    """Return torch's tests as a class that runs them in this process."""
    from torch.testing._internal.common_utils import TestCase, instantiate_parametrized_tests

    class Lockstep(distributed_test.DistributedTest._DistTestBase, TestCase):  # type: ignore[misc]
        world_size = os.environ["WORLD_SIZE"]
        file_name = str(Path(os.environ["TEMP_DIR"]) / "group")
        init_method = f"file://{file_name}"

        def setUp(self) -> None:
            super().setUp()  # type: ignore[no-untyped-call]
            self.rank = rank

    instantiate_parametrized_tests(Lockstep)
    return Lockstep


if __name__ == "__main__":
    main([name for name in sys.argv[1:] if name != "--own"], "--own" in sys.argv)
