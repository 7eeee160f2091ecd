"""Ways to gather short texts from all processes of a job before any backend runs.

Each uses what one kind of launcher provides: a key-value server, horovodrun's HTTP server, or a folder if all processes
share a node. For MPI, see mpi.py:gather.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import stat
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

from ..errors import ConfigurationError
from ..types import Launch
from .keyvalue import KeyValueClient

__all__ = (
    "ADVICE",
    "Gather",
    "gather_through",
    "gather_through_files",
    "gather_through_http",
    "gather_through_server",
    "not_arrived",
)

Gather = Callable[[str], list[str]]
"""Sends this process's text; returns every process's text in rank order. Collective over the launched processes."""

_Set = Callable[[str, "str | None"], None]
"""Sets the text of a key; None removes the key."""
_Get = Callable[[str], "str | None"]
"""Returns the text of a key; None when it is not set yet."""

ADVICE = (
    "Look at its output; every process must call dualdist.init(). "
    "Set DUALDIST_START_TIMEOUT_SECONDS to wait longer."
)
_POLL_SECONDS = 0.02
_FAREWELL_SECONDS = 1.0
"""How long a rank that gives up stays, so that the others can read why. Rank 0 may serve what they read."""


def gather_through(
    rank: int,
    size: int,
    set_: Callable[[str, str], object],
    get: Callable[[str, float], str | None],
    timeout: float,
    *,
    advice: str = ADVICE,
    at_poll: Callable[[], object] = lambda: None,
) -> Gather:
    """Return a Gather that uses a key-value store.

    Rank 0 reads every rank's text and sets all of them under one key, or why it could not. Each other rank waits for
    that key only. When a rank does not arrive, all that have arrived raise the same ConfigurationError.

    get: waits for a key, for a number of seconds, and returns its text, or None. timeout: seconds from this rank's
    call until it gives up. advice: the last sentences of the error. at_poll: called on rank 0 while it waits.
    """
    rounds = itertools.count()

    def missing(number: int) -> list[int]:
        return [other for other in range(size) if get(f"{number}.{other}", 0) is None]

    def give_up(number: int, key: str, ranks: list[int]) -> ConfigurationError:
        error = not_arrived(rank, ranks, timeout, advice)
        set_(f"{number}.{key}", json.dumps(str(error)))
        time.sleep(_FAREWELL_SECONDS)
        return error

    def lead(number: int) -> None:
        deadline = time.monotonic() + timeout
        texts: list[str] = []
        while len(texts) < size:
            text = get(f"{number}.{len(texts)}", 0)
            if text is not None:
                texts.append(text)
                continue
            at_poll()
            if time.monotonic() > deadline:
                raise give_up(number, "all", missing(number))
            if (failure := get(f"{number}.failure", 0)) is not None:
                set_(f"{number}.all", failure)
                return
            time.sleep(_POLL_SECONDS)
        set_(f"{number}.all", json.dumps(texts))

    def gather(text: str) -> list[str]:
        number = next(rounds)
        set_(f"{number}.{rank}", text)
        if rank == 0:
            lead(number)
        answer = get(f"{number}.all", timeout)
        if answer is None:
            raise give_up(number, "failure", missing(number) or [0])
        found = json.loads(answer)
        if isinstance(found, str):
            raise ConfigurationError(found)
        return list(found)

    return gather


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
        cleanup.callback(remove, key)

    def get(key: str, seconds: float) -> str | None:
        try:
            return client.get(key, seconds).decode()
        except TimeoutError:
            return None
        except OSError as error:
            raise ConfigurationError(
                f"Rank {launch.rank} lost the connection to the job's key-value server, which the launcher or rank 0 "
                f"runs: {error}. Look at their output."
            ) from error

    return gather_through(launch.rank, launch.size, set_, get, timeout)


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
        new = folder / f"{key}.new"
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
    def set_until_cleanup(key: str, text: str) -> None:
        cleanup.callback(set_, key, None)
        set_(key, text)

    def wait_for(key: str, seconds: float) -> str | None:
        deadline = time.monotonic() + seconds
        while (answer := get(key)) is None and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        return answer

    return gather_through(launch.rank, launch.size, set_until_cleanup, wait_for, timeout)
