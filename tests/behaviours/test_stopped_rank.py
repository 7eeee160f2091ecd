"""A process that is stopped (SIGSTOP): the errors of the other ranks name it, and no other rank."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dualdist as hvd
from dualdist.core.backends.base import Group, Work
from dualdist.core.world import channel_of

from ..helpers.files import wait_for
from ..helpers.ranks import check_next_calls_work
from ..helpers.rejoining import rejoin, rejoined
from ..helpers.world import World

STOPPED = 1


def stop() -> None:
    """Stop this process until another one continues it."""
    os.kill(os.getpid(), signal.SIGSTOP)


class StoppingWork(Work):
    """Sends nothing, and stops this process in the wait for the others' data. before: waits for these."""

    def __init__(self, before: Callable[[], None]) -> None:
        self._before = before

    def wait(self) -> None:
        self._before()
        stop()

    def done(self) -> bool:
        return False


def wait_until_stopped(process: int) -> None:
    while Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        pass


def check_starts_without_waiting(allreduce_: Callable[..., Work]) -> None:
    try:
        started = [allreduce_(torch.ones(3), hvd.Sum, tag=f"another {number}") for number in range(3)]
    except hvd.StallError as error:
        raise AssertionError("an allreduce waited for the stopped rank before it started") from error
    assert not any(work.done() for work in started)


def stop_in(group: Group, call: Callable[[], None], process: int, folder: Path | None) -> None:
    """Make `call`; rank 1 stops instead of sending data over `group`.

    process: of rank 1. folder: where the others report that they have started to send; then rank 1 stops. None: they
    start afterwards.
    """
    former = group.allreduce_
    files = [] if folder is None else [folder / f"started {rank}" for rank in (0, 2)]

    def allreduce_(*args: Any, **kwargs: Any) -> Work:
        if hvd.rank() == STOPPED:
            return StoppingWork(lambda: wait_for(files))
        if folder is None:
            wait_until_stopped(process)
            check_starts_without_waiting(former)
        work = former(*args, **kwargs)
        if folder is not None:
            (folder / f"started {hvd.rank()}").touch()
        return work

    group.allreduce_ = allreduce_  # type: ignore[method-assign]
    try:
        call()
    finally:
        group.allreduce_ = former  # type: ignore[method-assign]


def allreduce() -> None:
    hvd.allreduce_(torch.ones(5000), name="loss")


def backward_of(optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["params"][0].sum().backward()


def import_what_torch_imports_later() -> None:
    """torch imports its compiler with the first optimizer: seconds, at another moment on each rank."""
    torch.optim.SGD([nn.Parameter(torch.zeros(3))], lr=1.0)


def error_while_stopped(where: str, folder: Path) -> str:
    """Make a call in which rank 1 stops; return the error. When both others have theirs, rank 0 continues rank 1."""
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([nn.Parameter(torch.zeros(3))], lr=1.0))
    call = functools.partial(backward_of, optimizer) if where == "gradients" else allreduce
    call()
    processes = hvd.allgather_object(os.getpid())
    if where != "call":
        channel = channel_of(hvd.global_process_set)
        group = channel.gradients if where == "gradients" else channel.group
        started = None if where == "data afterwards" else folder
        call = functools.partial(stop_in, group, call, processes[STOPPED], started)
    if hvd.rank() == STOPPED:
        if where != "call":
            with contextlib.suppress(hvd.HorovodInternalError):
                call()
            return ""
        stop()
        with pytest.raises(hvd.HorovodInternalError) as raised:
            call()
        return str(raised.value)
    with pytest.raises(hvd.StallError) as caught:
        call()
    marker = folder / "done"
    if hvd.rank() == 2:
        marker.touch()
    else:
        wait_for([marker])
        os.kill(processes[STOPPED], signal.SIGCONT)
    return str(caught.value)


def error_and_rejoin(where: str, folder: Path) -> str:
    error = error_while_stopped(where, folder)
    rejoin()
    check_next_calls_work()
    return error


@pytest.mark.only_ci
@pytest.mark.ranks(3)
def test_errors_name_a_stopped_rank_and_no_other(world: World, tmp_path: Path) -> None:
    world.run(import_what_torch_imports_later)
    # After more than 2 s without an answer, a rank is not called slow any more.
    with rejoined(world, {"DUALDIST_STALL_TIMEOUT_SECONDS": "2.1"}):
        for where in ("call", "data", "data afterwards", "gradients"):
            (tmp_path / where).mkdir()
            first, stopped, last = world.run(error_and_rejoin, where, tmp_path / where)
            check_others(where, first, last)
            if where == "call":
                missing = r"missing ranks: \[1\]\.\n  rank 1: did not run for \d+ s: stopped, .*"
                assert re.search(f"{missing}; now waiting in allreduce", stopped), stopped


def check_others(where: str, *errors: str) -> None:
    """Check what ranks 0 and 2 have raised."""
    for error in errors:
        call = "gradient synchronization" if where == "gradients" else "allreduce"
        first, stopped, waiting = error.splitlines()
        assert first.startswith(f"{call}(") and first.endswith("missing ranks: [1].")
        assert stopped == "  rank 1: no answer: it is stopped"
        assert waiting.startswith(f"  ranks 0, 2: waiting in {call}(") and f"at {__file__}:" in waiting
