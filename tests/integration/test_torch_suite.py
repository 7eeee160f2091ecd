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


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("ranks", [2, 3])
def test_results_are_as_recorded(ranks: int, request: pytest.FixtureRequest) -> None:
    need_modules("expecttest")  # torch's tests import it
    results = torch_suite.run(ranks, [] if request.config.getoption("--all") else QUICK)
    assert "passed" in results.values()
    assert torch_suite.differences(ranks, results) == []


def test_every_test_that_does_not_pass_has_a_reason() -> None:
    for ranks in (2, 3):
        assert all(reason for reason in torch_suite.expected(ranks).values())
