"""`dualdist.spawn` with real processes: results in order, the first failure is raised, and no thread is left."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from types import ModuleType

import pytest
import torch

import dualdist as hvd
from dualdist.errors import ConfigurationError, ProcessEndedError

from ..helpers import spawn_functions
from ..helpers.requirements import need_modules


@pytest.mark.usefixtures("python")
@pytest.mark.parametrize("backend", ["torch", "horovod"])
def test_every_backend_joins_the_processes_to_one_world(backend: str) -> None:
    need_modules(*["horovod.torch"] * (backend == "horovod"))
    results = hvd.spawn(
        spawn_functions.train, (backend,), 2, backend=backend, env={"OMP_NUM_THREADS": "1"}, timeout=100
    )
    for rank, (*numbers, total) in enumerate(results):
        assert numbers == [rank, 2, rank, 2, "spawn"]
        assert torch.equal(total, torch.tensor([3.0, 3.0]))


def test_results_are_in_rank_order_whatever_their_size() -> None:
    text = b"\xff" * 3_000_000
    assert hvd.spawn(spawn_functions.describe, (10, text), 3) == [(rank, 3, rank * 10, text) for rank in range(3)]


def test_the_default_is_one_process_per_gpu_or_a_single_one() -> None:
    assert len(hvd.spawn(spawn_functions.describe, (1, b""))) == max(1, torch.cuda.device_count())


def test_variables_are_set_in_the_processes_and_not_in_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "7")
    assert hvd.spawn(spawn_functions.environment, ("A",), 2, env={"A": "b c"}) == ["b c", "b c"]
    assert hvd.spawn(spawn_functions.environment, ("RANK",), 2) == ["0", "1"]
    assert hvd.spawn(spawn_functions.environment, ("DUALDIST_BACKEND",), 1, backend="torch") == ["torch"]
    assert "A" not in os.environ


def test_the_first_exception_is_raised_here_with_the_ranks_traceback() -> None:
    with pytest.raises(KeyError, match="the reason") as caught:
        hvd.spawn(spawn_functions.fail, (1,), 3)
    cause = str(caught.value.__cause__)
    assert "Rank 1 of 3" in cause and 'raise KeyError("the reason")' in cause
    assert "spawn_child.py" not in cause


@pytest.mark.parametrize(
    ("function", "args", "code", "words"),
    [
        (spawn_functions.kill_itself, (1,), -signal.SIGKILL, "was ended by SIGKILL before its function returned"),
        (spawn_functions.end_with, (3, False), 3, "ended with exit code 3 before"),
        (spawn_functions.end_with, (0, True), 0, "ended with exit code 0 before"),
    ],
)
def test_the_error_for_a_death_without_an_exception_names_rank_and_exit_code(
    function: object, args: tuple[object, ...], code: int, words: str
) -> None:
    with pytest.raises(ProcessEndedError, match=words) as caught:
        hvd.spawn(function, args, 2)  # type: ignore[arg-type]
    assert (caught.value.rank, caught.value.exit_code) == (1, code)


def test_leaving_by_sys_exit_without_a_code_returns_none() -> None:
    assert hvd.spawn(spawn_functions.end_with, (0, False), 2) == ["returned", None]


def test_an_exception_that_cannot_be_pickled_is_reported_as_text() -> None:
    with pytest.raises(ProcessEndedError, match=r"Rank 0 raised .*Unsendable: 1 and 2") as caught:
        hvd.spawn(spawn_functions.raise_unsendable, nprocs=1)
    assert "Traceback" in str(caught.value.__cause__)


def test_a_result_that_cannot_be_pickled_is_an_error() -> None:
    with pytest.raises(TypeError, match="must return an object that can be pickled, but returned a lock instead"):
        hvd.spawn(spawn_functions.return_unsendable, nprocs=1)


def test_processes_are_ended_after_the_timeout() -> None:
    with pytest.raises(TimeoutError, match=r"ranks \[0, 1\] still ran"):
        hvd.spawn(spawn_functions.block, nprocs=2, timeout=0.5)


def test_arguments_that_cannot_be_pickled_are_an_error_before_anything_starts(tmp_path: Path) -> None:
    marker = tmp_path / "started"
    with pytest.raises(ConfigurationError, match="lambda"):
        hvd.spawn(lambda: marker.touch(), nprocs=1)
    with pytest.raises(ConfigurationError, match="lock"):
        hvd.spawn(spawn_functions.describe, (1, threading.Lock()), 1)
    assert not marker.exists()


def test_a_function_typed_into_a_prompt_is_an_error_that_asks_for_a_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "__main__", ModuleType("__main__"))
    monkeypatch.setattr(spawn_functions.block, "__module__", "__main__")
    with pytest.raises(ConfigurationError, match="comes from a prompt"):
        hvd.spawn(spawn_functions.block, nprocs=1)
    assert hvd.spawn(spawn_functions.describe, (1, b""), 1) == [(0, 1, 0, b"")]


def test_no_thread_and_no_open_file_is_left() -> None:
    hvd.spawn(spawn_functions.describe, (1, b""), 1)
    before = threading.active_count(), len(os.listdir("/proc/self/fd"))
    hvd.spawn(spawn_functions.describe, (1, b""), 2)
    assert (threading.active_count(), len(os.listdir("/proc/self/fd"))) == before


def test_an_interrupt_of_the_parent_ends_the_processes() -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            hvd.spawn(spawn_functions.interrupt, (os.getpid(),), 2)
    finally:
        signal.signal(signal.SIGINT, before)


def pretend_to_be(path: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Make the script `path`, with content `text`, the main module, which the processes run first."""
    script = ModuleType("__main__")
    script.__file__ = str(path)
    path.write_text(text)
    monkeypatch.setitem(sys.modules, "__main__", script)
    return script


def test_a_script_without_a_main_guard_is_an_error_instead_of_endless_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_to_be(tmp_path / "script.py", "import dualdist\ndualdist.spawn(print, nprocs=1)\n", monkeypatch)
    with pytest.raises(RuntimeError, match=r"^dualdist.spawn must .* `if __name__ == '__main__':`"):
        hvd.spawn(print, nprocs=1)


def test_the_error_for_a_function_under_the_main_guard_says_to_move_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = pretend_to_be(tmp_path / "script.py", "", monkeypatch)
    monkeypatch.setattr(spawn_functions.block, "__module__", "__main__")
    monkeypatch.setattr(script, "block", spawn_functions.block, raising=False)
    with pytest.raises(AttributeError, match="Define it in its file outside `if __name__"):
        hvd.spawn(spawn_functions.block, nprocs=1)
    monkeypatch.setattr(spawn_functions.block, "__module__", spawn_functions.__name__)
    monkeypatch.setattr(spawn_functions.block, "__qualname__", "gone")
    monkeypatch.setattr(spawn_functions, "gone", spawn_functions.block, raising=False)
    with pytest.raises(AttributeError, match=r"'gone' on .*spawn_functions.*'>$"):
        hvd.spawn(spawn_functions.block, nprocs=1)
