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

__all__ = ("Gather", "gather_through", "gather_through_files", "gather_through_http", "gather_through_server")

Gather = Callable[[str], list[str]]
"""Sends this process's text; returns every process's text in rank order. Collective over the launched processes."""

_Set = Callable[[str, "str | None"], None]
"""Sets the text of a key; None removes the key."""
_Get = Callable[[str], "str | None"]
"""Returns the text of a key; None when it is not set yet."""

_POLL_SECONDS = 0.02


def gather_through(
    rank: int, size: int, set_: Callable[[str, str], object], get: Callable[[str], str]
) -> Gather:
    """Return a Gather that uses a key-value store, whose `get` waits for the key.

    Rank 0 reads every rank's text and sets all of them under one key. Each other rank uses the store only twice.
    """
    rounds = itertools.count()

    def gather(text: str) -> list[str]:
        number = next(rounds)
        set_(f"{number}.{rank}", text)
        if rank == 0:
            set_(f"{number}.all.0", json.dumps([get(f"{number}.{other}") for other in range(size)]))
        return list(json.loads(get(f"{number}.all.0")))

    return gather


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

    def get(key: str) -> str:
        try:
            return client.get(key, timeout).decode()
        except OSError as error:  # TimeoutError is one
            raise ConfigurationError(
                f"Rank {launch.rank} waited for rank {key.rpartition('.')[2]}, which did not arrive: {error} "
                "Look at that rank's output; every process must call dualdist.init()."
            ) from error

    return gather_through(launch.rank, launch.size, set_, get)


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

    return _gather_by_polling(launch, set_, get, address, timeout, cleanup)


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

    return _gather_by_polling(launch, set_, get, str(folder), timeout, cleanup)


def _gather_by_polling(
    launch: Launch, set_: _Set, get: _Get, where: str, timeout: float, cleanup: contextlib.ExitStack
) -> Gather:
    def set_until_cleanup(key: str, text: str) -> None:
        cleanup.callback(set_, key, None)
        set_(key, text)

    def wait_for(key: str) -> str:
        deadline = time.monotonic() + timeout
        while (answer := get(key)) is None:
            if time.monotonic() > deadline:
                raise ConfigurationError(
                    f"Rank {launch.rank} waited {timeout:.0f} s for rank {key.rpartition('.')[2]} at {where}. "
                    "Look at that rank's output; every process must call dualdist.init()."
                )
            time.sleep(_POLL_SECONDS)
        return answer

    return gather_through(launch.rank, launch.size, set_until_cleanup, wait_for)
