"""A missing rank: rank 0 logs which rank is missing, and the waiting ranks raise."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dualdist as hvd
from dualdist.core.world import current

from ..helpers.collected_warnings import warned
from ..helpers.files import wait_for
from ..helpers.ranks import is_last
from ..helpers.rejoining import rejoined
from ..helpers.world import World


class KeptMessages(logging.Handler):
    """Keeps the log messages, and makes a file at the first one."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.file = file
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())
        self.file.touch()


@contextmanager
def kept_messages(file: Path) -> Iterator[list[str]]:
    handler, logger = KeptMessages(file), logging.getLogger("dualdist")
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield handler.messages
    finally:
        logger.propagate = True
        logger.removeHandler(handler)


@contextmanager
def logging_when(count: int) -> Iterator[None]:
    """Let rank 0 log in the `with` block once `count` ranks wait in an allreduce. Each may be late by any time."""
    watch: Any = current().observation.watch  # type: ignore[attr-defined]
    log = watch._log

    def log_if_all_wait() -> None:
        doing = watch.channels["set 0"].survey().members.values()
        if sum("waiting in allreduce(" in each.text for each in doing) == count:
            log()

    with pytest.MonkeyPatch.context() as patch:
        if hvd.rank() == 0:
            patch.setattr(watch, "_log", log_if_all_wait)
        yield


def warm_up() -> None:
    """Do what takes seconds the first time in a process, so that no rank is late by accident."""
    weight = nn.Parameter(torch.zeros(1))
    weight.sum().backward()
    torch.optim.SGD([weight], lr=1.0).step()


def wait_in_sets(file: Path) -> tuple[str, list[str]]:
    """Wait for the last rank in a set of two: rank 0 for a handle, rank 1 in a backward that only rank 1 repeats."""
    last, raised = hvd.size() - 1, [file.with_name(f"raised {rank}") for rank in range(hvd.size() - 1)]
    pairs = [hvd.add_process_set([rank, last]) for rank in range(last)]
    weight = nn.Parameter(torch.zeros(2))
    if pairs[1].included():
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), process_set=pairs[1])
        weight.sum().backward()
    hvd.barrier()
    with kept_messages(file) as messages:
        if hvd.rank() == last:
            return "", messages
        with pytest.raises(hvd.StallError) as caught:
            if hvd.rank() == 0:
                hvd.synchronize(hvd.allgather_async(torch.ones(5000), name="loss", process_set=pairs[0]))
            else:
                weight.sum().backward()
                optimizer.step()
        raised[hvd.rank()].touch()
        wait_for(raised)  # rank 0 logs that rank 1 waits, too
        return str(caught.value), messages


def wait_for_missing_rank(file: Path) -> tuple[str, list[str]]:
    """Call allreduce on all ranks but the last; return the error and the log messages."""
    hvd.barrier()
    with kept_messages(file) as messages, logging_when(hvd.size() - 1):
        if is_last():
            return "", messages
        with pytest.raises(hvd.StallError) as caught:
            hvd.allreduce(torch.ones(2), name="loss")
        with pytest.raises(hvd.HorovodInternalError, match=r"shutdown\(\) and init\(\)"):
            hvd.allreduce(torch.ones(1))
        return str(caught.value), messages


def call_late(file: Path) -> list[str]:
    """Sum over all ranks, the last rank only after rank 0 has logged that it is missing. Return the messages."""
    hvd.barrier()
    with kept_messages(file) as messages, logging_when(hvd.size() - 1):
        if is_last():
            wait_for([file])
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()
    return messages


def wait_for_other_names(file: Path) -> list[str]:
    """Sum under two names, the last rank in the other order and only after rank 0 has logged. Return the messages."""
    names = ["mine", "theirs"] if is_last() else ["theirs", "mine"]
    hvd.barrier()
    with kept_messages(file) as messages, logging_when(hvd.size()):
        first = hvd.allreduce_async(torch.ones(1), name=names[0], op=hvd.Sum)
        if is_last():
            wait_for([file])
        else:
            hvd.synchronize(first)
        assert hvd.allreduce(torch.ones(1), name=names[1], op=hvd.Sum).item() == hvd.size()
        hvd.synchronize(first)
    return messages


@warned()  # a world that stays up prints nothing
def wait_for_another_name(file: Path) -> str:
    """Wait on rank 0 for a call that the last rank does not make: it has another one pending. Return the error."""
    pair, error = hvd.add_process_set([0, hvd.size() - 1]), ""
    if hvd.rank() == 0:
        with pytest.raises(hvd.StallError) as caught:
            hvd.allreduce(torch.ones(1), name="mine", process_set=pair)
        file.touch()
        error = str(caught.value)
    handle = hvd.allreduce_async(torch.ones(1), name="theirs", process_set=pair) if is_last() else None
    wait_for([file])
    if handle is not None:
        with pytest.raises(hvd.HorovodInternalError):
            hvd.synchronize(handle)
    hvd.remove_process_set(pair)
    return error


@pytest.mark.ranks(3)
def test_a_late_rank_is_logged_and_a_missing_one_is_an_error(world: World, tmp_path: Path) -> None:
    with rejoined(world, {"DUALDIST_STALL_WARN_SECONDS": "0.3"}):
        world.run(warm_up)
        first, *others = world.run(call_late, tmp_path / "late")
        assert len(first) == 1 and "ranks [0, 1] wait in allreduce" in first[0]
        assert first[0].endswith("missing ranks: [2].")
        assert others == [[], []]
        first, *others = world.run(wait_for_other_names, tmp_path / "names")
        assert first and others == [[], []]
        message = first[0]  # from then on, the ranks continue one after the other
        theirs = "theirs" in message
        waiting, name, missing = ("[0, 1]", "theirs", "[2]") if theirs else ("[2]", "mine", "[0, 1]")
        assert f"ranks {waiting} wait in allreduce" in message and f"name='{name}'" in message
        assert message.endswith(f"missing ranks: {missing}.")
        with rejoined(world, {"DUALDIST_STALL_TIMEOUT_SECONDS": "2"}):
            check_missing_ranks(world, tmp_path)


def check_missing_ranks(world: World, tmp_path: Path) -> None:
    """Check errors of a rank with other calls, of two process sets without a rank, and of the whole world."""
    error, *_ = world.run(wait_for_another_name, tmp_path / "another name")
    assert "missing ranks: [2]" in error
    assert re.search(r"rank 2: waiting in allreduce\(.*name='theirs'", error)
    pairs = world.run(wait_in_sets, tmp_path / "pairs")
    check_errors(pairs)
    messages = sorted(pairs[0][1])
    for rank in (0, 1):
        assert f"ranks [{rank}] wait in " in messages[rank] and messages[rank].endswith("missing ranks: [2].")
    everybody = world.run(wait_for_missing_rank, tmp_path / "everybody")
    check_errors(everybody)
    (message,) = everybody[0][1]
    assert "Stalled for 0.3 s" in message and f"{__file__}:" in message
    assert "ranks [0, 1] wait in allreduce" in message and message.endswith("missing ranks: [2].")


def check_errors(results: list[tuple[str, list[str]]]) -> None:
    """Check the errors of the waiting ranks, and that only rank 0 has logged."""
    *waiting, last = results
    for error, _ in waiting:
        assert "stalled" in error and "missing ranks: [2]" in error and f"{__file__}:" in error
    assert [messages for _, messages in [*waiting[1:], last]] == [[], []]
