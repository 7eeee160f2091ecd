"""Timelines: Horovod's event names for every collective, on every backend."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import dualdist as hvd

from ..helpers.files import wait_for
from ..helpers.rejoining import outside_world
from ..helpers.trace_reader import read_marks, read_spans
from ..helpers.world import everywhere


@contextmanager
def recorded(path: Path, mark_cycles: bool = False) -> Iterator[dict[str, list[str]]]:
    """Record the body; the dictionary is filled at its end, on rank 0."""
    spans: dict[str, list[str]] = {}
    hvd.barrier()
    hvd.start_timeline(str(path), mark_cycles)
    yield spans
    hvd.stop_timeline()
    if hvd.rank() == 0:
        spans.update(read_spans(path))


def expected(event: str, activity: str = "") -> list[str]:
    transport = hvd.transport_name().upper()
    return [f"NEGOTIATE_{event}", event, f"{event}/{transport}_{activity or event}"]


def without_marks(spans: list[str]) -> list[str]:
    return [span for span in spans if not span.startswith("[")]


@everywhere
def test_every_collective_has_horovods_events(tmp_path: Path) -> None:
    rows = torch.ones(2 * hvd.size(), 2)
    large = torch.ones(4000)
    with recorded(tmp_path / "timeline.json") as spans:
        hvd.allreduce(rows, name="t")
        hvd.allreduce_(large, name="large")
        hvd.grouped_allreduce([rows, rows], name="t")
        hvd.allgather(rows, name="t")
        hvd.broadcast(rows, 0, name="t")
        hvd.alltoall(rows, name="t")
        hvd.reducescatter(rows, name="t")
        hvd.reduce(rows, 0, name="t")
        hvd.gather(rows, 0, name="t")
        hvd.broadcast_object("object", 0)
        hvd.allgather_object("object")
        hvd.synchronize(hvd.allreduce_async(rows, name="later"))
        hvd.barrier()
    if hvd.rank() == 0:
        assert {name: without_marks(found) for name, found in spans.items()} == {
            "allreduce.t": expected("ALLREDUCE"),
            "allreduce.large": expected("ALLREDUCE"),
            "grouped_allreduce.t": expected("ALLREDUCE"),
            "allgather.t": expected("ALLGATHER"),
            "broadcast.t": expected("BROADCAST", "BCAST"),
            "alltoall.t": expected("ALLTOALL"),
            "reducescatter.t": expected("REDUCESCATTER"),
            "reduce.t": expected("REDUCE"),
            "gather.t": expected("GATHER"),
            "broadcast_object.noname": expected("BROADCAST", "BCAST"),
            "allgather_object.noname": expected("ALLGATHER"),
            "allreduce.later": expected("ALLREDUCE"),
            "barrier.noname": ["NEGOTIATE_BARRIER"],
        }


@pytest.mark.ranks(2)
@everywhere
def test_the_late_rank_is_marked_last(tmp_path: Path) -> None:
    go = tmp_path / "go"
    with recorded(tmp_path / "timeline.json") as spans:
        if hvd.rank() == 0:
            handle = hvd.allreduce_async(torch.ones(1), name="t")
            while "NEGOTIATE" not in (tmp_path / "timeline.json").read_text():
                pass
            go.touch()
            hvd.synchronize(handle)
        else:
            wait_for([go])
            hvd.allreduce(torch.ones(1), name="t")
    if hvd.rank() == 0:
        assert spans["allreduce.t"][1:3] == ["[0]", "[1]"]


@everywhere
def test_gradients_are_recorded_by_bucket(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), groups=2)
    with recorded(tmp_path / "timeline.json") as spans:
        for _ in range(2):
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    if hvd.rank() == 0:
        (agreement,) = (name for name in spans if name.count(".") == 2)
        assert without_marks(spans.pop(agreement)) == 2 * ["NEGOTIATE_ALLREDUCE"]
        assert sorted(spans) == [f"{agreement}.0", f"{agreement}.1"]
        assert all(bucket == 2 * expected("ALLREDUCE")[1:] for bucket in spans.values())


@everywhere
def test_cycles_are_marked_when_asked(tmp_path: Path) -> None:
    for mark_cycles in (False, True):
        path = tmp_path / f"{mark_cycles}.json"
        with recorded(path, mark_cycles):
            hvd.allreduce(torch.ones(1))
        if hvd.rank() == 0:
            assert ("CYCLE_START" in read_marks(path)) == mark_cycles


@pytest.mark.ranks(2, 3)
@everywhere
def test_only_rank_0_writes(tmp_path: Path) -> None:
    with recorded(tmp_path / f"{hvd.rank()}.json"):
        hvd.allreduce(torch.ones(1))
    hvd.barrier()
    assert [path.name for path in tmp_path.iterdir()] == ["0.json"]


@pytest.mark.ranks(2, 3)
@everywhere
def test_a_mismatch_leaves_a_whole_file(tmp_path: Path) -> None:
    with recorded(tmp_path / "timeline.json") as spans, pytest.raises(hvd.HorovodInternalError):
        hvd.allreduce(torch.ones(1 + hvd.rank()), name="t")
    if hvd.rank() == 0:
        assert without_marks(spans["allreduce.t"]) == ["NEGOTIATE_ALLREDUCE"]


@pytest.mark.ranks(2, 3)
@everywhere
def test_process_sets_do_not_mix(tmp_path: Path) -> None:
    some = hvd.add_process_set([0])
    with recorded(tmp_path / "timeline.json") as spans:
        handles = [hvd.allreduce_async(torch.ones(5000), name="every") for _ in range(1)]
        if some.included():
            for _ in range(5):
                hvd.allreduce(torch.ones(1), name="some", process_set=some)
        hvd.synchronize(handles[0])
    hvd.remove_process_set(some)
    if hvd.rank() == 0:
        assert without_marks(spans["allreduce.some"]) == 5 * expected("ALLREDUCE")


@everywhere
def test_another_file_replaces_the_open_one_and_the_same_one_is_continued(tmp_path: Path) -> None:
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    hvd.start_timeline(str(first))
    hvd.allreduce(torch.ones(1), name="a")
    hvd.start_timeline(str(first))
    hvd.allreduce(torch.ones(1), name="b")
    hvd.start_timeline(str(second))
    hvd.allreduce(torch.ones(1), name="c")
    hvd.stop_timeline()
    hvd.stop_timeline()
    if hvd.rank() == 0:
        assert list(read_spans(first)) == ["allreduce.a", "allreduce.b"]
        assert list(read_spans(second)) == ["allreduce.c"]


@pytest.mark.ranks(2)
@everywhere
def test_only_dualdist_writes_the_file_of_the_environment_variable(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    with outside_world(), pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOROVOD_TIMELINE", str(path))
        hvd.init()
        hvd.allreduce(torch.ones(4000), name="t")
        hvd.shutdown()
    assert list(read_spans(path)) == ["allreduce.t"]
