"""torch's own tests of DistributedDataParallel have the recorded results with dualdist's class. See torch_suite.py."""

from __future__ import annotations

import pytest

from ..helpers.requirements import need_modules
from . import torch_suite

QUICK = [
    "test_DistributedDataParallelCPU",
    "test_ddp_broadcast_buffer",
    "test_ddp_bucket_cap_mb_list",
    "test_ddp_device_mesh_initialization",
    "test_ddp_ignore_params_arg",
    "test_stateless_api_with_ddp",
]
"""Tests that run without --all, too."""


QUICK_OVER_MPI = [
    "test_DistributedDataParallelCPU",
    "test_all_reduce_sum_async",
    "test_barrier_full_group",
    "test_ddp_static_graph_nested_types",
]
"""torch_suite.py --mpi --own runs all tests over MPI."""


@pytest.mark.only_ci
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.only_all)])
def test_results_are_as_recorded(ranks: int, request: pytest.FixtureRequest) -> None:
    need_modules("expecttest")  # torch's tests import it
    results = torch_suite.run(ranks, [] if request.config.getoption("--all") else QUICK)
    assert "passed" in results.values()
    assert torch_suite.differences(ranks, results) == []


@pytest.mark.only_all
@pytest.mark.timeout(1200)
def test_results_over_mpi_are_as_recorded() -> None:
    need_modules("expecttest", "mpi4py")
    results = torch_suite.run(2, QUICK_OVER_MPI, own=True, mpi=True)
    assert "passed" in results.values()
    assert torch_suite.differences(2, results, own=True) == []


@pytest.mark.only_all
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("ranks", [2, 3])
def test_results_of_our_class_over_mpi_are_as_recorded(ranks: int, request: pytest.FixtureRequest) -> None:
    need_modules("expecttest", "mpi4py")
    results = torch_suite.run(ranks, [] if request.config.getoption("--all") else QUICK, mpi=True)
    assert "passed" in results.values()
    assert torch_suite.differences(ranks, results) == []


def test_every_test_that_does_not_pass_has_a_reason() -> None:
    for listed in (torch_suite.expected(2), torch_suite.expected(3), torch_suite.expected(2, own=True)):
        assert all(listed.values())
