"""`report`: which rank is slow, in what, and by how much."""

from __future__ import annotations

import json
import math
import os
import re
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dualdist as hvd

from ..helpers.world import everywhere

SLOW = 1
"""The rank that takes longer."""
STEPS = 8
DELAY = 0.1
"""Seconds in each step, many times what a step takes without it."""
KINDS = ("computing", "data_loading", "waiting", "communication")


def take_time() -> None:
    """Take DELAY on the slow rank, without keeping a core from the others."""
    if hvd.rank() == SLOW:
        threading.Event().wait(DELAY)


class Slow(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        take_time()
        return x


def report_of_training(place: str, style: str) -> dict[str, Any]:
    """Train with a delay in one `place`, and return the report."""
    middle = Slow() if place == "forward" else nn.Identity()
    model: nn.Module = nn.Sequential(nn.Linear(3, 3), middle, nn.Linear(3, 1))
    if place == "backward":
        model[0].weight.register_hook(lambda grad: take_time())  # type: ignore[index]
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if style == "module":
        model = hvd.DistributedDataParallel(model)
    else:
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    for number in range(STEPS + 2):
        if number == 2:  # the first steps make connections
            hvd.report()
        if place == "loading":
            take_time()
        optimizer.zero_grad()
        model(torch.ones(4, 3)).sum().backward()
        optimizer.step()
    return hvd.report()


@pytest.mark.parametrize("style", ["module", "optimizer"])
@pytest.mark.parametrize("place", ["loading", "forward", "backward"])
@everywhere
def test_the_slow_rank_is_named_with_its_reason(place: str, style: str) -> None:
    found = report_of_training(place, style)
    assert [row["rank"] for row in found["ranks"]] == list(range(hvd.size()))
    for row in found["ranks"]:
        assert math.isclose(sum(row[kind] for kind in KINDS), 1)
        assert row["calls"] == STEPS + 1
    if hvd.size() == 1:
        assert (found["slowest"], found["reason"], found["share"]) == (None, None, 0)
        return
    reason = "data_loading" if place == "loading" else "computing"
    assert (found["slowest"], found["reason"]) == (SLOW, reason)
    slow = found["ranks"][SLOW]
    assert slow[reason] >= STEPS * DELAY / slow["seconds"]


@everywhere
def test_a_wait_for_a_handle_is_waiting_and_work_beside_it_is_not() -> None:
    hvd.report()
    handle = hvd.allreduce_async(torch.ones(2), name="beside")
    threading.Event().wait(DELAY)
    hvd.synchronize(handle)
    beside = hvd.report()["ranks"][hvd.rank()]
    assert beside["computing"] * beside["seconds"] >= DELAY
    take_time()
    hvd.synchronize(hvd.allreduce_async(torch.ones(2), name="waited for"))
    if hvd.size() > 1:
        assert hvd.report()["slowest"] == SLOW


def summed_up(where: str) -> None:
    """Train one step in a world of one, whose summary goes to `where`."""
    os.environ["DUALDIST_SUMMARY"] = where
    hvd.init()
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()
    hvd.shutdown()


def test_a_rank_writes_its_summary_when_it_leaves_the_world(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DUALDIST_SUMMARY", "")
    summed_up(str(tmp_path / "new"))
    written = json.loads((tmp_path / "new" / "time-0.json").read_text())
    assert written["rank"] == 0 and written["data_loading"] > 0
    summed_up("1")
    assert re.fullmatch(
        r"dualdist: rank 0, \d+\.\d s: computing .* %, data loading .* %, waiting .* %, communication .* %\n",
        capfd.readouterr().err,
    )
