"""`report`: which rank is slow, in what, and by how much."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import dualdist as hvd
from dualdist.core.world import current

from ..helpers.collected_warnings import warned
from ..helpers.requirements import need_programs
from ..helpers.styles import distributed
from ..helpers.world import everywhere

SLOW = 1
"""The rank that takes longer."""
WARM_UP, STEPS = 2, 5
DELAY = 0.1
"""Seconds in each step, many times what a step takes without it."""
UNDISTURBED = 1.5 * STEPS * DELAY
"""Fewer seconds than these show that DELAY is most of the time."""
KINDS = ("computing", "data_loading", "waiting", "communication")


def take_time() -> None:
    """Take DELAY on the slow rank, without keeping a core from the others."""
    if hvd.rank() == SLOW:
        threading.Event().wait(DELAY)


class Slow(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        take_time()
        return x


class Rows(Dataset[torch.Tensor]):
    """The rows of STEPS batches of 4."""

    def __init__(self, is_slow: bool) -> None:
        self.is_slow = is_slow

    def __len__(self) -> int:
        return 4 * STEPS

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.is_slow and index % 4 == 3:
            take_time()
        return torch.ones(3)


def report_of_training(place: str, style: str) -> dict[str, Any]:
    """Train with a delay in one `place`, and return the report."""
    middle = Slow() if place == "forward" else nn.Identity()
    model: nn.Module = nn.Sequential(nn.Linear(3, 3), middle, nn.Linear(3, 1))
    if place == "backward":
        model[0].weight.register_hook(lambda grad: take_time())  # type: ignore[index]
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    model, optimizer = distributed(style, model, torch.optim.SGD(model.parameters(), lr=0.1))
    loader = DataLoader(Rows(place == "loading"), batch_size=4)
    for number, inputs in enumerate(itertools.chain(itertools.islice(loader, WARM_UP), loader)):
        if number == WARM_UP:  # the first steps make connections
            hvd.report()
        optimizer.zero_grad()
        model(inputs).sum().backward()
        optimizer.step()
    return hvd.report()


@pytest.mark.parametrize(
    ("place", "style"),
    [("loading", "module"), ("forward", "optimizer"), ("backward", "module"), ("backward", "optimizer")],
)
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
    slow = found["ranks"][SLOW]
    # The system may stop a rank for longer than this test does; that is then what the report names.
    if max(row["seconds"] for row in found["ranks"]) < UNDISTURBED:
        assert (found["slowest"], found["reason"]) == (SLOW, reason)
    # The first batch is there before the report.
    assert slow[reason] >= (STEPS - (place == "loading")) * DELAY / slow["seconds"]


@everywhere
def test_rank_0_logs_which_rank_is_slow_and_since_when() -> None:
    watch: Any = current().observation.watch  # type: ignore[attr-defined]
    found: list[str] = []
    start, length, share = time.time_ns(), 10 * 10**9, 0.0 if hvd.rank() == SLOW else 0.75
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(watch, "_next_look", math.inf)  # until this test looks, the watch's own thread does not
        patch.setattr(watch, "slow_share", 0.25)
        for kept in ("_spent", "_slow"):  # no look that follows this test compares with its values
            patch.setattr(watch, kept, getattr(watch, kept))
        for look in range(3):
            spent = (start + look * length, int(look * length * share), 0, 0, 0, 0)
            patch.setattr(watch.usage, "values", lambda spent=spent: spent)
            hvd.barrier()
            with warned() as messages:
                if hvd.rank() == 0:
                    watch.look_for_slow_rank()
            found += messages if look else []  # the first one looks back to the start
            hvd.barrier()
    if hvd.rank() != 0 or hvd.size() == 1:
        assert found == []
        return
    clock = time.strftime("%H:%M:%S", time.localtime(start / 1e9))
    expected = (
        f"The others wait 75 % of the time (7.5 of 10.0 s) more than rank {SLOW} since {clock}: its computing takes "
        "longer than theirs. DUALDIST_SLOW_WARN_SHARE=1 turns this message off."
    )
    assert found == [expected, expected]


@everywhere
def test_a_report_counts_the_bytes_that_a_rank_gives_to_reductions() -> None:
    model = nn.Linear(3, 1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()  # the bucket has 4 numbers
    before = hvd.report()["ranks"][hvd.rank()]["bytes_reduced"]
    hvd.allreduce(torch.ones(5, dtype=torch.float64))
    hvd.synchronize(hvd.grouped_allreduce_async([torch.ones(2, 3), torch.ones(4000)]))
    hvd.allgather(torch.ones(100))
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    (found,) = {row["bytes_reduced"] for row in hvd.report()["ranks"]}
    assert (before >= 16, found) == (True, 5 * 8 + 4006 * 4 + 16)


@everywhere
def test_the_profiler_shows_agreements_collectives_and_buckets_as_named_ranges() -> None:
    model = nn.Linear(3, 1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    with torch.profiler.profile() as profile:
        hvd.allreduce(torch.ones(4000), name="large")
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    names = {event.key for event in profile.key_averages()}
    for event in ("NEGOTIATE_ALLREDUCE allreduce.large", "ALLREDUCE allreduce.large"):
        assert f"dualdist::{event}" in names
    assert any(re.fullmatch(r"dualdist::NEGOTIATE_ALLREDUCE allreduce\.gradients\.\d+", name) for name in names)
    assert any(re.fullmatch(r"dualdist::ALLREDUCE allreduce\.gradients\.\d+\.0", name) for name in names)


@everywhere
def test_work_beside_an_asynchronous_call_is_computing() -> None:
    hvd.report()
    handle = hvd.allreduce_async(torch.ones(2), name="beside")
    threading.Event().wait(DELAY)
    hvd.synchronize(handle)
    beside = hvd.report()["ranks"][hvd.rank()]
    assert beside["computing"] * beside["seconds"] >= DELAY


@pytest.mark.parametrize("fullgraph", [False, True])
def test_compiled_models_stay_compiled(fullgraph: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    need_programs("g++")
    monkeypatch.setenv("DUALDIST_SUMMARY", "")
    hvd.init()
    graphs = 0

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        def run(*args: torch.Tensor) -> Any:
            nonlocal graphs
            graphs += 1
            return graph(*args)

        return run

    model = nn.Linear(1, 1)
    model.compile(backend=backend, fullgraph=fullgraph)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        for _ in range(4):
            hvd.report()
            with torch.no_grad():
                model(torch.ones(1, 1))
            optimizer.step()
    finally:
        hvd.shutdown()
    assert graphs == 4


def summed_up(where: str) -> None:
    """Load data in a world of one, whose summary goes to `where`."""
    os.environ["DUALDIST_SUMMARY"] = where
    hvd.init()
    for _ in DataLoader(Rows(False)):
        pass
    hvd.report()
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
