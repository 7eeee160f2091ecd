"""A rank that never comes: rank 0 says who is missing, and the waiting ranks raise. Each world is one of its own."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn

import dualdist as hvd

from ..helpers.world import WORLDS, World, started

CASES = [name for name in WORLDS if name.endswith("-3")]


class Heard(logging.Handler):
    """Keeps what is logged, and makes a file when the first record comes."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.file = file
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())
        self.file.touch()


@contextmanager
def heard(file: Path) -> Iterator[list[str]]:
    handler, logger = Heard(file), logging.getLogger("dualdist")
    logger.addHandler(handler)
    try:
        yield handler.messages
    finally:
        logger.removeHandler(handler)


def ready() -> None:
    """Do what takes a process seconds the first time, so that no rank is late without wanting to be."""
    weight = nn.Parameter(torch.zeros(1))
    weight.sum().backward()
    torch.optim.SGD([weight], lr=1.0).step()


def wait_in_sets(file: Path) -> tuple[str, list[str]]:
    """Wait for the last rank in a set of two: rank 0 for a handle, rank 1 in a backward that it alone does again."""
    last = hvd.size() - 1
    pairs = [hvd.add_process_set([rank, last]) for rank in range(last)]
    weight = nn.Parameter(torch.zeros(2))
    if pairs[1].included():
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), process_set=pairs[1])
        weight.sum().backward()
    hvd.barrier()
    with heard(file) as messages:
        if hvd.rank() == last:
            return "", messages
        with pytest.raises(hvd.StallError) as caught:
            if hvd.rank() == 0:
                hvd.synchronize(hvd.allgather_async(torch.ones(5000), name="loss", process_set=pairs[0]))
            else:
                weight.sum().backward()
                optimizer.step()
        return str(caught.value), messages


def wait_in_vain(file: Path) -> tuple[str, list[str]]:
    """Reduce without the last rank; return the error and what was logged."""
    with heard(file) as messages:
        if hvd.rank() == hvd.size() - 1:
            return "", messages
        with pytest.raises(hvd.StallError) as caught:
            hvd.allreduce(torch.ones(2), name="loss")
        with pytest.raises(hvd.HorovodInternalError, match=r"shutdown\(\) and init\(\)"):
            hvd.allreduce(torch.ones(1))
        return str(caught.value), messages


def come_late(file: Path) -> list[str]:
    """Sum, the last rank only when rank 0 has missed it; return what was logged."""
    with heard(file) as messages:
        while hvd.rank() == hvd.size() - 1 and not file.exists():
            pass
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()
    return messages


@pytest.fixture
def impatient(request: pytest.FixtureRequest) -> Iterator[World]:
    """Three ranks that warn after 0.3 s and raise after 2 s."""
    seconds = {"DUALDIST_STALL_WARN_SECONDS": "0.3", "DUALDIST_STALL_TIMEOUT_SECONDS": "2"}
    with started(*WORLDS[request.param], seconds) as world:
        yield world


@pytest.mark.parametrize("impatient", CASES, indirect=True)
def test_a_late_rank_is_warned_of_and_a_missing_one_is_an_error(impatient: World, tmp_path: Path) -> None:
    """One world for all of it, since a world costs seconds: a late rank, two sets that lack it, and the whole world."""
    impatient.run(ready)
    first, *others = impatient.run(come_late, tmp_path / "late")
    assert len(first) == 1 and "waited for by ranks [0, 1]; missing ranks: [2]" in first[0]
    assert others == [[], []]
    pairs = impatient.run(wait_in_sets, tmp_path / "pairs")
    check_errors(pairs)
    messages = sorted(pairs[0][1])
    for rank in (0, 1):
        assert f"waited for by ranks [{rank}]; missing ranks: [2]" in messages[rank]
    everybody = impatient.run(wait_in_vain, tmp_path / "everybody")
    check_errors(everybody)
    (message,) = everybody[0][1]
    assert "Stalled for 0.3 s" in message and f"{__file__}:" in message
    assert "waited for by ranks [0, 1]; missing ranks: [2]" in message


def check_errors(results: list[tuple[str, list[str]]]) -> None:
    """Check what the waiting ranks raised, and that only rank 0 has logged."""
    *waiting, last = results
    for error, _ in waiting:
        assert "stalled" in error and "missing ranks: [2]" in error and f"{__file__}:" in error
    assert [messages for _, messages in [*waiting[1:], last]] == [[], []]
