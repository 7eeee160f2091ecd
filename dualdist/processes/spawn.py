"""Starting a function in several fresh processes of this machine; dualdist.spawn is the public face of it.

The processes are those of multiprocessing's start method "spawn": nothing is inherited but what is pickled. They are
started and ended as those of `dualdist run` are, so that none is left behind, not even when this process is killed.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing import spawn as multiprocessing_spawn
from typing import Any

from ..errors import ConfigurationError, ProcessEndedError
from ..launch.environment import process_variables, without_launchers
from ..rendezvous.keyvalue import KeyValueServer
from . import child
from .agent import ENDED
from .supervisor import BOOTSTRAP, Crew, Event, Process, Spec, ending

__all__ = ("spawn_processes",)

_CHUNK = 1 << 20
_SETTLE_SECONDS = 0.2
"""How long other failures may come in once there is one: the first to be heard of is not always the first."""
_REAPING_SECONDS = 0.02
"""How much later a death is noticed than by the peers, who then raise."""


class _RankTraceback(Exception):
    """The traceback of a rank, as the cause of the exception that is raised here."""

    def __str__(self) -> str:
        return f"\n\n{self.args[0]}"


@dataclass(frozen=True)
class _Failure:
    time: float
    rank: int
    error: BaseException
    cause: BaseException | None = None


def spawn_processes(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    size: int,
    env: Mapping[str, str],
    variables: Mapping[str, str],
    timeout: float | None,
) -> list[Any]:
    """Run `fn(*args)` in `size` processes and return the results in rank order; see dualdist.spawn.

    env: the environment of this process. variables: what to add to it.
    """
    task = _pickled_task(fn, args)
    secret = secrets.token_bytes(32)
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(KeyValueServer("127.0.0.1", secret=secret))
        source = stack.enter_context(tempfile.TemporaryFile())
        source.write(task)
        source.flush()
        results = [_Result(rank) for rank in range(size)]
        for result in results:
            stack.callback(result.close)
        numbers = [
            process_variables("spawn", rank, size, rank, size, f"127.0.0.1:{server.port}", secret)
            for rank in range(size)
        ]
        processes = [
            Process(rank, _argv(source.fileno(), result.end), numbers[rank], (source.fileno(), result.end))
            for rank, result in enumerate(results)
        ]
        output = (os.dup(1), os.dup(2))
        for copy in output:
            stack.callback(os.close, copy)
        spec = Spec(
            "localhost", BOOTSTRAP, processes, without_launchers(env) | dict(variables), output=output
        )
        return _Job(results, timeout).follow(stack.enter_context(Crew([spec])))


def _pickled_task(fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    typed = file is None or not os.path.exists(file)  # into a prompt, a notebook, or the standard input
    if typed and getattr(fn, "__module__", None) == "__main__":
        raise ConfigurationError(
            f"`fn` must be a function that a fresh process can import, but {fn!r} was typed in instead. "
            "Write it into a module."
        )
    try:
        work = pickle.dumps((fn, args))
    except Exception as error:
        raise ConfigurationError(
            f"`fn` and `args` must be such that pickle takes them, but it says {error} instead. "
            "Use a function at the top of a module, and hand over what can be copied."
        ) from error
    preparation = multiprocessing_spawn.get_preparation_data("dualdist")
    if typed:
        preparation.pop("init_main_from_path", None)
    preparation["authkey"] = bytes(preparation["authkey"])  # else it refuses to be pickled
    return pickle.dumps((preparation, work))


def _argv(task: int, result: int) -> list[str]:
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined] # as multiprocessing
    path = os.path.abspath(child.__file__)
    code = (
        "import sys\nwith open(sys.argv[1], 'rb') as f: s = f.read()\nexec(compile(s, sys.argv[1], 'exec'))"
    )
    return [sys.executable, *flags, "-c", code, path, str(task), str(result)]


class _Result:
    """The pipe through which one rank sends one message."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.message: tuple[str, float, Any] | None = None
        self.exit: Event | None = None
        self._reader, self.end = os.pipe()
        os.set_blocking(self._reader, False)
        self._data = bytearray()

    @property
    def reader(self) -> int:
        return self._reader

    def drain(self) -> None:
        """Take everything that has come."""
        with contextlib.suppress(BlockingIOError):
            while self.message is None and self.read():
                pass

    def read(self) -> bool:
        """Take what has come; return whether more may come."""
        data = os.read(self._reader, _CHUNK)
        self._data += data
        if len(self._data) >= 8 and len(self._data) == 8 + int.from_bytes(self._data[:8], "big"):
            self.message = pickle.loads(self._data[8:])
            return False
        return bool(data)

    def close(self) -> None:
        for descriptor in (self._reader, self.end):
            with contextlib.suppress(OSError):
                os.close(descriptor)


class _Job:
    """Waits for the results, or for the first failure."""

    def __init__(self, results: list[_Result], timeout: float | None) -> None:
        self._results = results
        self._timeout = timeout

    def follow(self, crew: Crew) -> list[Any]:
        deadline = None if self._timeout is None else time.monotonic() + self._timeout
        for result in self._results:
            crew.watch(result.reader, result.read)
        while not all(result.exit for result in self._results):
            self._hear(crew, deadline)
            if self._failures():
                settled = time.monotonic() + _SETTLE_SECONDS
                while (left := settled - time.monotonic()) > 0 and not all(r.exit for r in self._results):
                    self._note(crew.wait(left))
                first = min(self._failures(), key=lambda failure: failure.time)
                raise first.error from first.cause
        return [self._unpickled(result) for result in self._results]

    def _hear(self, crew: Crew, deadline: float | None) -> None:
        left = float("inf") if deadline is None else deadline - time.monotonic()
        if left <= 0:
            missing = [result.rank for result in self._results if result.exit is None]
            raise TimeoutError(
                f"`spawn` must end within `timeout`={self._timeout:g} s, but ranks {missing} still ran. "
                "They were ended. Give it more time, or look at what they wait for."
            )
        self._note(crew.wait(left))

    def _note(self, events: list[Event]) -> None:
        for event in events:
            if event.fact.get("error") or event.kind == ENDED:
                result = self._results[event.rank]
                result.drain()
                result.exit = event

    def _failures(self) -> list[_Failure]:
        found = []
        for result in self._results:
            if result.message is not None and result.message[0] == child.RAISED:
                found.append(self._raised(result.rank, *result.message[1:]))
            elif result.exit is not None and (result.message is None or result.exit.fact.get("code") != 0):
                found.append(self._died(result.rank, result.exit))
        return found

    def _raised(self, rank: int, moment: float, what: tuple[bytes | None, str]) -> _Failure:
        pickled, text = what
        told = f"Rank {rank} of {len(self._results)}:\n{text}"
        if pickled is None:
            line = text.strip().splitlines()[-1]
            error: BaseException = ProcessEndedError(f"Rank {rank} raised {line}", rank, None)
        else:
            error = pickle.loads(pickled)
        return _Failure(moment, rank, error, _RankTraceback(told))

    def _died(self, rank: int, exit: Event) -> _Failure:
        how = exit.fact.get("error")
        code = exit.fact.get("code")
        if how is None:
            when = "after" if self._results[rank].message is not None else "before"
            how = f"{ending(code or 0)} {when} its function returned"
        moment = exit.fact.get("time", time.monotonic()) - _REAPING_SECONDS
        text = f"Rank {rank} of {len(self._results)} {how}; the others were ended. Look at what it printed."
        return _Failure(moment, rank, ProcessEndedError(text, rank, code))

    @staticmethod
    def _unpickled(result: _Result) -> Any:
        assert result.message is not None
        return pickle.loads(result.message[2])
