"""The file of a timeline can be read at any time, however the process ends."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dualdist.observation.timeline import TraceFile

from ..helpers.forks import forked
from ..helpers.trace_reader import read_marks, read_spans

ENDINGS = {
    "pass": 0,
    "hvd.shutdown()": 0,
    "raise ValueError": 1,
    "sys.exit(3)": 3,
    "os._exit(3)": 3,
    "os.kill(os.getpid(), signal.SIGTERM)": -signal.SIGTERM,
    "os.kill(os.getpid(), signal.SIGKILL)": -signal.SIGKILL,
}
"""Last line of a script -> its exit code."""
SCRIPT = """
import os, signal, sys, torch
import dualdist as hvd

hvd.init()
hvd.allreduce(torch.ones(3), name="a")
"""


def run(code: str, path: Path) -> int:
    environment = os.environ | {"HOROVOD_TIMELINE": str(path), "HOROVOD_TIMELINE_MARK_CYCLES": "1"}
    return subprocess.run(
        forked([sys.executable, "-c", SCRIPT + code]),
        env=environment,
        stderr=subprocess.DEVNULL,
        timeout=60,
        check=False,
    ).returncode


@pytest.mark.parametrize("ending", ENDINGS)
def test_the_file_is_whole_however_the_process_ends(ending: str, tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    assert run(ending, path) == ENDINGS[ending]
    assert read_spans(path) == {"allreduce.a": ["NEGOTIATE_ALLREDUCE", "[0]", "ALLREDUCE", "ALLREDUCE/LOCAL_ALLREDUCE"]}
    assert read_marks(path) == ["CYCLE_START"]


def test_the_dynamic_timeline_waits_for_start_timeline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "timeline.json"
    code = f"hvd.start_timeline({str(path)!r}); hvd.broadcast(torch.ones(3), 0, name='b')"
    assert run(code, Path("DYNAMIC")) == 0
    assert list(read_spans(path)) == ["broadcast.b"]
    assert [file.name for file in tmp_path.iterdir()] == ["timeline.json"]


def test_a_file_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    assert run("", tmp_path / "absent" / "timeline.json") == 1


def test_every_write_leaves_valid_json(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    trace = TraceFile(str(path))
    assert read_spans(path) == {}
    pid = trace.track("allreduce.a", ["weight", "bias"])
    for _ in range(3):
        trace.begin(pid, 0, "OUTER", "INNER", args={"quoted": '"'})
        trace.end(pid, 0)
        trace.mark(pid, 0, {"1": trace.now(), "0": trace.now()})
        trace.end(pid, 0)
        spans = read_spans(path)
    trace.close()
    assert spans == read_spans(path)
    assert sorted(spans["allreduce.a"][:4]) == ["OUTER", "OUTER/INNER", "[0]", "[1]"]


def test_close_ends_open_spans_and_later_writes_are_ignored(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    trace = TraceFile(str(path))
    pid = trace.track("a")
    trace.begin(pid, 0, "OUTER", "INNER")
    trace.begin(pid, 1, "OTHER")
    trace.close()
    size = path.stat().st_size
    trace.end(pid, 0, 2)
    trace.close()
    assert path.stat().st_size == size
    assert read_spans(path) == {"a": ["OUTER", "OUTER/INNER", "OTHER"]}


def test_a_full_disk_ends_the_trace_and_not_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*args: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    path = tmp_path / "trace.json"
    trace = TraceFile(str(path))
    monkeypatch.setattr(os, "pwrite", fail)
    trace.begin(trace.track("a"), 0, "OUTER")
    trace.close()
    assert read_spans(path) == {}
    assert [record.message for record in caplog.records] == [
        f"The timeline {path} ends here: [Errno 28] No space left on device."
    ]
