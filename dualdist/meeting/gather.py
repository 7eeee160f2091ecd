"""Ways to gather short texts from all processes of a job before any backend runs.

Each uses what one kind of launcher provides: a key-value server, horovodrun's HTTP server, or a folder if all processes
share a node. For MPI, see mpi_gather.py.
"""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import os
import stat
import time
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import NoReturn

from ..errors import ConfigurationError
from ..types import Launch
from .keyvalue import KeyValueClient

Gather = Callable[[str], list[str]]
"""Sends this process's text; returns every process's text in rank order. Collective over the launched processes."""

_Set = Callable[[str, "str | None"], None]
"""Sets the text of a key; None removes the key."""
_Get = Callable[[str], "str | None"]
"""Returns the text of a key; None when it is not set yet."""

ADVICE = (
    "Look at its output; every process must call dualdist.init(), with a rank of its own. "
    "Set DUALDIST_START_TIMEOUT_SECONDS to wait longer."
)
_POLL_SECONDS = 0.02
_FAREWELL_SECONDS = 3.0
"""How long the rank that reports an error waits for those that read it. It may serve what they read."""
_KEYS_AT_ONCE = 64
"""How many keys rank 0 checks in one request. It repeats the request after every change."""
_TEXT, _ERROR = "+", "-"
"""The first character of a value."""

_on_error: ContextVar[Callable[[str, bool], object]] = ContextVar(
    "on_error", default=lambda text, is_own: None
)


@contextlib.contextmanager
def reporting_errors(on_error: Callable[[str, bool], object]) -> Iterator[None]:
    """Call `on_error(text, is_own)` when ranks do not arrive, before any rank raises that error.

    The rank that reports the error calls it first, with is_own=True; then the ranks that receive the error. So what the
    first call prints is printed before the launcher sees that a process has failed, and ends the others.
    """
    token = _on_error.set(on_error)
    try:
        yield
    finally:
        _on_error.reset(token)


def gather_through(
    rank: int,
    size: int,
    set_: Callable[[str, str], object],
    get: Callable[[Sequence[str], float], Sequence[str] | None],
    timeout: float,
    *,
    advice: str = ADVICE,
    pause: Callable[[float], object] | None = None,
    remove_later: Callable[[str], object] = lambda key: None,
) -> Gather:
    """Return a Gather that uses a key-value store.

    Rank 0 reads every rank's text and sets all of them under one key, or why it could not. Each other rank waits for
    that key only. When a rank does not arrive, all that have arrived raise the same ConfigurationError. A rank that
    gives up sets the error in place of the missing texts, which ends rank 0's wait; if rank 0 is missing, in place of
    its answer. The rank that reports the error stays until the others have read it.

    Args:
        get: waits until all keys are set, for a number of seconds, and returns their texts, or None.
        timeout: seconds from this rank's call until it gives up.
        advice: the last sentences of the error.
        pause: on rank 0, waits at most so many seconds for a change, in place of `get`.
        remove_later: removes a key when this process needs the Gather no more.
    """
    return _Gatherer(rank, size, set_, get, timeout, advice, pause, remove_later).gather


class _Gatherer:
    """See `gather_through`."""

    def __init__(
        self,
        rank: int,
        size: int,
        set_: Callable[[str, str], object],
        get: Callable[[Sequence[str], float], Sequence[str] | None],
        timeout: float,
        advice: str,
        pause: Callable[[float], object] | None,
        remove_later: Callable[[str], object],
    ) -> None:
        self._rank, self._size = rank, size
        self._set, self._get, self._pause, self._remove_later = set_, get, pause, remove_later
        self._timeout, self._advice = timeout, advice
        self._rounds = itertools.count()

    def gather(self, text: str) -> list[str]:
        number = next(self._rounds)
        self._put(f"{number}.{self._rank}", _TEXT + text)
        answer = f"{number}.all"
        if self._rank == 0:
            self._lead(number, answer, time.monotonic() + self._timeout)
        found = self._get([answer], self._timeout)
        if found is None:
            found = [self._give_up(number, answer)]
        if found[0].startswith(_ERROR):
            error = found[0].removeprefix(_ERROR)
            self._set(f"{number}.read.{self._rank}", _TEXT)
            _on_error.get()(error, False)
            raise ConfigurationError(error)
        return list(json.loads(zlib.decompress(base64.b64decode(found[0].removeprefix(_TEXT)))))

    def _put(self, key: str, value: str) -> None:
        self._remove_later(key)
        self._set(key, value)

    def _lead(self, number: int, answer: str, deadline: float) -> None:
        """On rank 0, answer with the texts of all ranks. Raises ConfigurationError if a rank does not arrive."""
        if self._get([answer], 0) is not None:  # another rank has waited too long for this one
            return
        keys = [f"{number}.{rank}" for rank in range(self._size)]
        if self._pause is not None:
            self._pause_until_set(keys, deadline)
        texts = self._get(keys, max(0.0, deadline - time.monotonic()))
        if texts is None:
            self._report(number, answer, self._error(self._missing(number)))
            return
        error = next((text for text in texts if text.startswith(_ERROR)), None)
        if error is not None:
            self._report(number, answer, error.removeprefix(_ERROR))
        # Ranks repeat much of each other's texts, and a KeyValueServer takes values of a limited length.
        joined = json.dumps([text.removeprefix(_TEXT) for text in texts]).encode()
        self._put(answer, _TEXT + base64.b64encode(zlib.compress(joined)).decode())

    def _pause_until_set(self, keys: Sequence[str], deadline: float) -> None:
        assert self._pause is not None
        for start in range(0, len(keys), _KEYS_AT_ONCE):
            while self._get(keys[start : start + _KEYS_AT_ONCE], 0) is None:
                left = deadline - time.monotonic()
                if left <= 0:
                    return
                self._pause(left)

    def _missing(self, number: int) -> list[int]:
        """Return the ranks without a text."""
        found = (self._get([f"{number}.{rank}"], 0) for rank in range(self._size))
        return [rank for rank, texts in enumerate(found) if texts is None or texts[0].startswith(_ERROR)]

    def _error(self, missing: list[int]) -> str:
        return str(not_arrived(self._rank, missing, self._timeout, self._advice))

    def _give_up(self, number: int, answer: str) -> str:
        """On a rank other than 0, report the missing ranks to rank 0, and return its answer."""
        missing = self._missing(number) or [0]
        error = self._error(missing)
        if 0 in missing:
            self._report(number, answer, error)
        for rank in missing:
            self._put(f"{number}.{rank}", _ERROR + error)
        found = self._get([answer], _FAREWELL_SECONDS)
        if found is None:  # rank 0 has ended, and the other ranks may wait for it
            self._report(number, answer, self._error([0]))
        return found[0]

    def _report(self, number: int, answer: str, error: str) -> NoReturn:
        """Raise `error` on this rank and, through `answer`, on all that have arrived."""
        _on_error.get()(error, True)
        self._put(answer, _ERROR + error)
        # Several ranks may give up at the same time. Each stays until the others have read, or report as well.
        own = f"{number}.read.{self._rank}"
        self._set(own, _ERROR)
        missing = {self._rank, *self._missing(number)}
        deadline = time.monotonic() + _FAREWELL_SECONDS
        other_reports = False
        for rank in set(range(self._size)) - missing:
            read = f"{number}.read.{rank}"
            self._remove_later(read)
            found = self._get([read], max(0.0, deadline - time.monotonic()))
            other_reports |= found == [_ERROR]
        if not other_reports:  # else that rank removes the key, when it has read it
            self._remove_later(own)
        raise ConfigurationError(error)


def not_arrived(rank: int, ranks: list[int], timeout: float, advice: str) -> ConfigurationError:
    """Return the error of `rank`, which has waited `timeout` seconds for `ranks`."""
    others = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
    return ConfigurationError(
        f"Rank {rank} waited {timeout:.0f} s for {others}, which did not arrive. {advice}"
    )


def gather_through_server(
    launch: Launch, client: KeyValueClient, timeout: float, cleanup: contextlib.ExitStack
) -> Gather:
    """Return a Gather that uses a KeyValueServer. Closing `cleanup` removes the keys that it has set."""

    def remove(key: str) -> None:
        # If rank 0 runs the server, it may have closed it already.
        with contextlib.suppress(OSError):
            client.set(key, b"")

    def set_(key: str, text: str) -> None:
        client.set(key, text.encode())

    def get(keys: Sequence[str], seconds: float) -> list[str] | None:
        deadline = time.monotonic() + seconds
        try:
            return [client.get(key, deadline - time.monotonic()).decode() for key in keys]
        except TimeoutError:
            return None
        except OSError as error:
            raise ConfigurationError(
                f"Rank {launch.rank} lost the connection to the job's key-value server, which the launcher or rank 0 "
                f"runs: {error}. Look at their output."
            ) from error

    def remove_later(key: str) -> None:
        cleanup.callback(remove, key)

    return gather_through(launch.rank, launch.size, set_, get, timeout, remove_later=remove_later)


def gather_through_http(
    launch: Launch, address: str, timeout: float, cleanup: contextlib.ExitStack
) -> Gather:
    """Return a Gather that uses horovodrun's server at `address` (horovod/runner/http/http_server.py)."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    url = f"http://{address}/dualdist/"

    def set_(key: str, text: str | None) -> None:
        request = urllib.request.Request(url + key, (text or "").encode(), method="PUT")
        opener.open(request, timeout=timeout).close()

    def get(key: str) -> str | None:
        try:
            with opener.open(url + key, timeout=timeout) as answer:
                return str(answer.read().decode()) or None
        except urllib.error.HTTPError as error:
            # Not set yet.
            if error.code == 404:
                return None
            raise

    return _gather_by_polling(launch, set_, get, timeout, cleanup)


def gather_through_files(
    launch: Launch, folder: Path, timeout: float, cleanup: contextlib.ExitStack
) -> Gather:
    """Return a Gather that uses files in `folder`, which must belong to this user."""

    def check() -> None:
        status = folder.lstat()
        if status.st_uid != os.getuid() or not stat.S_ISDIR(status.st_mode):
            raise ConfigurationError(
                f"{folder} must be a folder of this user, but is not. Remove it, or set TMPDIR."
            )

    def set_(key: str, text: str | None) -> None:
        if text is None:
            (folder / key).unlink(missing_ok=True)
            # The folder is not empty while other ranks use it.
            with contextlib.suppress(OSError):
                folder.rmdir()
            return
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        check()
        new = folder / f"{key}.new.{launch.rank}"  # several ranks may report an error under one key
        new.write_text(text)
        new.replace(folder / key)

    def get(key: str) -> str | None:
        with contextlib.suppress(FileNotFoundError):
            check()
            return (folder / key).read_text()
        return None

    return _gather_by_polling(launch, set_, get, timeout, cleanup)


def _gather_by_polling(
    launch: Launch, set_: _Set, get: _Get, timeout: float, cleanup: contextlib.ExitStack
) -> Gather:
    def wait_for(keys: Sequence[str], seconds: float) -> list[str] | None:
        deadline = time.monotonic() + seconds
        texts: list[str] = []
        while len(texts) < len(keys):
            if (text := get(keys[len(texts)])) is not None:
                texts.append(text)
            elif time.monotonic() < deadline:
                time.sleep(_POLL_SECONDS)
            else:
                return None
        return texts

    def remove_later(key: str) -> None:
        cleanup.callback(set_, key, None)

    return gather_through(launch.rank, launch.size, set_, wait_for, timeout, remove_later=remove_later)
