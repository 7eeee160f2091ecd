"""Collectives in signal handlers: an error where they would wait for the call that they interrupt, else they work."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import pytest
import torch

import dualdist as hvd

from ..helpers.files import wait_for
from ..helpers.ranks import check_next_calls_work, is_last
from ..helpers.rejoining import rejoin
from ..helpers.world import everywhere

pytestmark = pytest.mark.ranks(2, 3)

_PAUSE_SECONDS = 0.02


def is_inside(frame: FrameType | None, function: str) -> bool:
    while frame is not None and frame.f_code.co_name != function:
        frame = frame.f_back
    return frame is not None


@contextlib.contextmanager
def interrupted(function: str, action: Callable[[], None]) -> Iterator[None]:
    """Run `action` in a signal handler, once, when the main thread is inside `function`."""

    def handle(number: int, frame: FrameType | None) -> None:
        if is_inside(frame, function):
            action()
        else:
            signal.setitimer(signal.ITIMER_REAL, _PAUSE_SECONDS)

    former = signal.signal(signal.SIGALRM, handle)
    signal.setitimer(signal.ITIMER_REAL, _PAUSE_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, former)


def calls(folder: Path) -> dict[str, Callable[[], object]]:
    return {
        "allreduce": lambda: hvd.allreduce(torch.ones(2)),
        "allreduce_async": lambda: hvd.allreduce_async(torch.ones(2)),
        "barrier": hvd.barrier,
        "broadcast_object": lambda: hvd.broadcast_object(1, 0),
        "join": hvd.join,
        "add_process_set": lambda: hvd.add_process_set([0]),
        "checkpoint.save": lambda: hvd.checkpoint.save(folder / "checkpoint", {"x": 1}),
    }


def errors_of(made: dict[str, Callable[[], object]]) -> dict[str, str]:
    """Return the error of each call, which must be neither of Horovod nor of arguments."""
    errors = {}
    for name, call in made.items():
        with pytest.raises(RuntimeError) as caught:
            call()
        assert not isinstance(caught.value, hvd.HorovodInternalError)
        errors[name] = str(caught.value)
    return errors


def sum_all() -> None:
    assert hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist() == [hvd.size()] * 2


def backward_of_a_module() -> Callable[[], object]:
    """Return a backward at whose end a rank waits in a call for the gradients of the others."""
    model = hvd.DistributedDataParallel(torch.nn.Linear(300, 300))
    loss: torch.Tensor = model(torch.ones(1, 300)).sum()
    return lambda: (loss.backward(), model)  # which must be alive


WAITING: dict[str, Callable[[], Callable[[], object]]] = {
    "allreduce": lambda: sum_all,
    "barrier": lambda: hvd.barrier,
    "join": lambda: hvd.join,
    "gradient synchronization": backward_of_a_module,
}


@pytest.mark.parametrize("waiting", WAITING)
@everywhere
def test_a_handler_that_interrupts_a_collective_gets_an_error_at_once(waiting: str, tmp_path: Path) -> None:
    """The last rank makes its call only after the handler of rank 0 has run, so rank 0 waits until then."""
    marker, errors, call = tmp_path / "handled", dict[str, str](), WAITING[waiting]()

    def handle() -> None:
        errors.update(errors_of(calls(tmp_path)))
        marker.touch()

    with interrupted("in_turn", handle) if hvd.rank() == 0 else contextlib.nullcontext():
        if is_last():
            wait_for([marker])
        call()
    for text in errors.values():
        assert f"interrupts {waiting}(" in text and f"{__file__}:" in text
        assert "CheckpointManager(signals=)" in text
    assert hvd.rank() != 0 or errors.keys() == calls(tmp_path).keys()
    check_next_calls_work()


@everywhere
def test_a_handler_that_interrupts_the_collective_of_another_set_gets_an_error(tmp_path: Path) -> None:
    marker, errors = tmp_path / "handled", []
    pair = hvd.add_process_set([0, 1]) if hvd.size() > 2 else hvd.global_process_set

    def handle() -> None:
        with pytest.raises(RuntimeError, match="interrupts barrier") as caught:
            hvd.allreduce(torch.ones(2), process_set=pair)
        errors.append(caught.value)
        marker.touch()

    with interrupted("in_turn", handle) if hvd.rank() == 0 else contextlib.nullcontext():
        if is_last():
            wait_for([marker])
        hvd.barrier()
    assert len(errors) == (hvd.rank() == 0)
    hvd.remove_process_set(pair)
    check_next_calls_work()


@everywhere
def test_a_handler_may_call_a_collective_while_its_thread_synchronizes(tmp_path: Path) -> None:
    marker, sums = tmp_path / "handled", []

    def handle() -> None:
        marker.touch()
        sums.append(hvd.allreduce(torch.full((5000,), 2.0), op=hvd.Sum))

    if hvd.rank() == 0:
        handle_of_first = hvd.allreduce_async(torch.ones(3), op=hvd.Sum)
        with interrupted("synchronize", handle):
            first = hvd.synchronize(handle_of_first)
    else:
        if is_last():
            wait_for([marker])
        first = hvd.allreduce(torch.ones(3), op=hvd.Sum)
        sums.append(hvd.allreduce(torch.full((5000,), 2.0), op=hvd.Sum))
    assert first.tolist() == [hvd.size()] * 3
    assert [numbers.tolist() for numbers in sums] == [[2.0 * hvd.size()] * 5000]
    check_next_calls_work()


@everywhere
def test_a_handler_may_call_a_collective_while_its_thread_is_idle() -> None:
    sums = []

    def handle(number: int, frame: FrameType | None) -> None:
        sums.append(hvd.allreduce(torch.ones(3), op=hvd.Sum).tolist())

    former = signal.signal(signal.SIGUSR2, handle)
    try:
        signal.raise_signal(signal.SIGUSR2)
    finally:
        signal.signal(signal.SIGUSR2, former)
    assert sums == [[hvd.size()] * 3]
    check_next_calls_work()


class Stop(Exception):
    pass


@everywhere
def test_the_other_ranks_name_the_one_whose_handler_raises(tmp_path: Path) -> None:
    """Rank 0 waits for the last rank when its handler raises. It stays, so that it can be asked."""

    def stop() -> None:
        raise Stop

    names = [tmp_path / str(rank) for rank in range(hvd.size())]
    if hvd.rank() == 0:
        with interrupted("in_turn", stop), pytest.raises(Stop):
            hvd.barrier()
        names[0].touch()
    else:
        if is_last():
            wait_for([names[0]])
        with contextlib.suppress(hvd.HorovodInternalError):
            hvd.barrier()  # rank 0 has sent some or all of its messages
        for _ in range(2):
            with pytest.raises(hvd.HorovodInternalError, match=r"missing ranks: \[0\]"):
                hvd.barrier()
        names[hvd.rank()].touch()
    for name in names:
        wait_for([name])
    rejoin()
    check_next_calls_work()
