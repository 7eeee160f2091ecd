"""init and shutdown, and the six numbers of a process."""

from __future__ import annotations

import gc
import logging
import os
import re
import weakref
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import dualdist as hvd

from ..helpers.collected_warnings import warned
from ..helpers.files import wait_for
from ..helpers.rejoining import outside_world, rejoin
from ..helpers.styles import step
from ..helpers.world import everywhere


@everywhere
def test_the_six_numbers_on_one_node() -> None:
    assert hvd.is_initialized()
    assert 0 <= hvd.rank() < hvd.size()
    assert (hvd.local_rank(), hvd.local_size()) == (hvd.rank(), hvd.size())
    assert (hvd.cross_rank(), hvd.cross_size()) == (0, 1)
    assert hvd.is_homogeneous()
    assert hvd.allgather_object(hvd.rank()) == list(range(hvd.size()))


@everywhere
def test_init_again_does_nothing() -> None:
    before = (hvd.rank(), hvd.size())
    hvd.init()
    hvd.init(process_sets=[[0]])
    hvd.init(backend=hvd.backend_name(), transport=hvd.transport_name(), rank=hvd.rank(), world_size=hvd.size())
    assert (hvd.rank(), hvd.size()) == before


@everywhere
def test_init_again_with_another_setting_raises() -> None:
    others: dict[str, Any] = {"backend": "another", "transport": "another", "rank": 7, "world_size": 7}
    for name, value in others.items():
        with pytest.raises(hvd.ConfigurationError, match=f"`{name}` must be .*, as in the world"):
            hvd.init(**{name: value})
    hvd.barrier()


@everywhere
def test_calls_before_init_and_after_shutdown_raise() -> None:
    with outside_world():
        assert not hvd.is_initialized()
        numbers = (hvd.rank, hvd.size, hvd.local_rank, hvd.local_size, hvd.cross_rank, hvd.cross_size)
        for call in (*numbers, hvd.barrier, lambda: hvd.allreduce(torch.ones(1))):
            with pytest.raises(hvd.NotInitializedError, match=r"dualdist\.init\(\)"):
                call()
        hvd.shutdown()
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()


@pytest.mark.ranks(1, 2)
@everywhere
def test_threads_that_call_init_at_once_join_one_world() -> None:
    with outside_world(), ThreadPoolExecutor(3) as threads:
        for joined in [threads.submit(hvd.init) for _ in range(3)]:
            joined.result()
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()


def held() -> dict[str, int]:
    """Return this process's numbers of descriptors (files, sockets) and threads, and its memory in bytes."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "memory": pages * os.sysconf("SC_PAGE_SIZE"),
    }


@pytest.mark.only_ci
@pytest.mark.ranks(2)
@everywhere
def test_repeated_worlds_leak_nothing() -> None:
    cycles = 10
    before: dict[str, int] = {}
    for number in range(3 + cycles):
        rejoin()
        weight = torch.nn.Parameter(torch.zeros(1))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0))
        weight.sum().backward()
        optimizer.step()
        assert hvd.synchronize(hvd.allreduce_async(torch.ones(5000), op=hvd.Sum)).sum().item() == 10000
        if number == 2:  # by now, everything that is made once per process exists
            before = held()
    grown = {name: after - before[name] for name, after in held().items()}
    # Less than one per cycle.
    assert grown["descriptors"] < cycles / 2 and grown["threads"] < cycles / 2, grown
    assert grown["memory"] < cycles * 256 * 1024, grown


@everywhere
def test_init_works_again_with_settings_of_horovod() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOROVOD_CYCLE_TIME", "1")  # ms; the default, since Horovod does not take it back
        patch.setenv("HOROVOD_FUSION_THRESHOLD", str(128 << 20))  # bytes; the default
        for _ in range(5):
            rejoin()
            assert hvd.allreduce(torch.ones(5000), op=hvd.Sum).tolist() == [hvd.size()] * 5000


@everywhere
def test_what_combines_gradients_is_freed_with_its_optimizer_without_a_garbage_collection() -> None:
    gc.disable()
    try:
        rejoin()
        weight = torch.nn.Parameter(torch.zeros(1))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0))
        weight.sum().backward()
        combiner = weakref.ref(optimizer._combiner)
        with outside_world():
            del optimizer
            assert combiner() is None
    finally:
        gc.enable()


@pytest.mark.ranks(2, 3)
@everywhere
def test_process_sets_can_be_given_to_init() -> None:
    given = hvd.ProcessSet([hvd.size() - 1])
    with outside_world():
        hvd.init(process_sets=[[0], given])
        try:
            assert given.process_set_id == 2
            if given.included():
                assert hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=given).item() == 1
            with pytest.raises(ValueError, match="registered already"):
                hvd.add_process_set([0])
        finally:
            hvd.shutdown()
        assert given.process_set_id is None
    with pytest.raises(TypeError, match="registered"):
        hvd.allreduce(torch.ones(1), process_set=given)


@pytest.mark.ranks(2, 3)
@everywhere
def test_a_timeout_given_to_init_ends_the_wait_for_a_rank(tmp_path: Path) -> None:
    missing, raised = list(range(hvd.size() - 1)), tmp_path / "raised"
    with outside_world():
        hvd.init(timeout=timedelta(seconds=2))
        try:
            if hvd.rank() not in missing:
                with pytest.raises(hvd.StallError, match=re.escape(f"missing ranks: {missing}")):
                    hvd.barrier()
                raised.touch()
            wait_for([raised])
        finally:
            hvd.shutdown()


@everywhere
def test_a_timeout_is_a_positive_number() -> None:
    rule = "`timeout` must be a finite number of at most 31536000 and above 0"
    timeouts: list[Any] = [0, -1.0, float("nan"), 1e15, "soon", timedelta(0)]
    for timeout in timeouts:
        with pytest.raises(hvd.ConfigurationError, match=rule):
            hvd.init(timeout=timeout)


@everywhere
def test_an_optimizer_outlives_its_world() -> None:
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0))
    for number in (1, 2):
        step(optimizer, weight)
        assert weight.item() == pytest.approx(-number * (hvd.size() + 1) / 2)
        rejoin()


@everywhere
def test_rank_0_logs_the_choice_in_one_line() -> None:
    logger = logging.getLogger("dualdist")
    logger.setLevel(logging.INFO)
    try:
        with warned() as lines, outside_world():
            pass
    finally:
        logger.setLevel(logging.NOTSET)
    assert len(lines) == (1 if hvd.rank() == 0 else 0)
    for line in lines:
        assert hvd.backend_name() in line and hvd.transport_name() in line and f"{hvd.size()} processes" in line


@pytest.mark.world_kinds("torch-gloo", "horovod-gloo")
@everywhere
def test_on_one_host_processes_listen_only_on_the_loopback() -> None:
    sockets = psutil.Process().net_connections("inet")
    listening = {entry.laddr.ip for entry in sockets if entry.status == psutil.CONN_LISTEN}
    assert listening <= {"127.0.0.1"}
    assert hvd.rank() != 0 or listening  # the store, at least
