"""Finding the first address: before any backend runs, the processes of a job tell each other a few words.

torchrun and `init_method` give an address; the other launchers do not, so the words travel by what each has:
the key-value server of `dualdist run` and `spawn`, that of horovodrun (plain HTTP, horovod/runner/http/http_server.py),
files when all processes share a node, MPI, or a key-value server at a place that Slurm tells.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import stat
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from ..errors import ConfigurationError
from ..launch.environment import RENDEZVOUS, secret_in
from ..types import Launch
from . import mpi, slurm
from .interfaces import LOOPBACK
from .keyvalue import KeyValueStore
from .reach import Gather, find_addresses
from .starter import find_starter

__all__ = ("exchange_address", "gather_through")

_POLL_SECONDS = 0.02

Set = Callable[[str, "str | None"], None]
"""Set a key's text; None removes it."""
Get = Callable[[str], "str | None"]
"""Return what was set under a key, None when it is not there yet."""


@contextlib.contextmanager
def exchange_address(
    launch: Launch, env: Mapping[str, str], serve: Callable[[str], int], timeout: float
) -> Iterator[tuple[str, int]]:
    """Give the (host, port) at which rank 0 serves. Collective over the launched processes.

    serve: called on rank 0 with the address that the others will use; binds and returns the port.
    timeout: seconds to wait for another process. What was told is removed at the end of the block, so that a later
    program of the same job does not find it: by then every process must have read it.
    Raises ConfigurationError when this launcher offers no way to exchange an address here.
    """
    with contextlib.ExitStack() as told:
        gather = _gather(launch, env, timeout, told)
        single_node = launch.size in (1, launch.local_size)
        host = LOOPBACK if single_node else find_addresses(launch.rank, gather, env).first
        port = gather(str(serve(host)) if launch.rank == 0 else "none")[0]
        yield host, int(port)


def gather_through(
    rank: int, size: int, set_: Callable[[str, str], object], get: Callable[[str], str]
) -> Gather:
    """Return a way to gather that goes through a key-value store, whose `get` waits for the key.

    Rank 0 reads every rank's text and sets all of them together, so that the store is asked a few times per rank.
    """
    rounds = itertools.count()

    def gather(text: str) -> list[str]:
        number = next(rounds)
        set_(f"{number}.{rank}", text)
        if rank == 0:
            set_(f"{number}.all.0", json.dumps([get(f"{number}.{other}") for other in range(size)]))
        return list(json.loads(get(f"{number}.all.0")))

    return gather


def _gather(launch: Launch, env: Mapping[str, str], timeout: float, told: contextlib.ExitStack) -> Gather:
    """Return the way in which the processes of `launch` can gather words; `told` removes them."""
    who = launch.sources.get("rank")
    if who == "DUALDIST_RANK" and env.get(RENDEZVOUS):
        host, _, port = env[RENDEZVOUS].rpartition(":")
        store = told.enter_context(KeyValueStore(host, int(port), secret_in(env)))
        return _gather_through_store(launch, store, timeout, told)
    if who == "HOROVOD_RANK" and env.get("HOROVOD_GLOO_RENDEZVOUS_ADDR"):
        server = f"{env['HOROVOD_GLOO_RENDEZVOUS_ADDR']}:{env['HOROVOD_GLOO_RENDEZVOUS_PORT']}"
        return _gather_patiently(launch, *_http(f"http://{server}/dualdist/", timeout), server, timeout, told)
    if launch.starts_mpi and mpi.has_started() and mpi.world_size() == launch.size:
        return mpi.gather
    if launch.size in (1, launch.local_size):
        folder = _job_folder(launch, env)
        return _gather_patiently(launch, *_files(folder), str(folder), timeout, told)
    if launch.starts_mpi and mpi.world_size() == launch.size:
        return mpi.gather
    if slurm.tells_first_host(env):
        store = told.enter_context(slurm.meet(launch.rank, env, timeout))
        return _gather_through_store(launch, store, timeout, told)
    raise ConfigurationError(
        f"World size is {launch.describe('size')} on several nodes, but no address of rank 0 is known. "
        "Install mpi4py (pip install 'dualdist[mpi]') and start MPI with the launcher (srun --mpi=pmix), or set "
        "MASTER_ADDR and MASTER_PORT for every process."
    )


def _gather_through_store(
    launch: Launch, store: KeyValueStore, timeout: float, told: contextlib.ExitStack
) -> Gather:
    def remove(key: str) -> None:
        with contextlib.suppress(OSError):  # rank 0 serves the store itself, and has closed it
            store.set(key, b"")

    def tell(key: str, text: str) -> None:
        store.set(key, text.encode())
        told.callback(remove, key)

    def get(key: str) -> str:
        try:
            return store.get(key, timeout).decode()
        except OSError as error:  # TimeoutError is one
            raise ConfigurationError(
                f"Rank {launch.rank} waited for rank {key.rpartition('.')[2]}, which did not come: {error} "
                "Look at that rank's output; every process must call dualdist.init()."
            ) from error

    return gather_through(launch.rank, launch.size, tell, get)


def _http(url: str, timeout: float) -> tuple[Set, Get]:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def put(key: str, text: str | None) -> None:
        request = urllib.request.Request(url + key, (text or "").encode(), method="PUT")
        opener.open(request, timeout=timeout).close()

    def look(key: str) -> str | None:
        try:
            with opener.open(url + key, timeout=timeout) as answer:
                return str(answer.read().decode()) or None
        except urllib.error.HTTPError as error:
            if error.code == 404:  # not published yet
                return None
            raise

    return put, look


def _files(folder: Path) -> tuple[Set, Get]:
    def check() -> None:
        if folder.lstat().st_uid != os.getuid() or not stat.S_ISDIR(folder.lstat().st_mode):
            raise ConfigurationError(
                f"{folder} must be a folder of this user, but is not. Remove it, or set TMPDIR."
            )

    def put(key: str, text: str | None) -> None:
        if text is None:
            (folder / key).unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # others have not come so far
                folder.rmdir()
            return
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        check()
        fresh = folder / f"{key}.new"
        fresh.write_text(text)
        fresh.replace(folder / key)

    def look(key: str) -> str | None:
        with contextlib.suppress(FileNotFoundError):
            check()
            return (folder / key).read_text()
        return None

    return put, look


def _job_folder(launch: Launch, env: Mapping[str, str]) -> Path:
    """Return a folder that only the processes of this job know."""
    names = ("PMIX_SERVER_URI", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
    job = [f"{name}={env[name]}" for name in sorted(env) if name.startswith(names)]
    job = job or [f"{part}" for part in find_starter(launch.sources["rank"])]
    digest = hashlib.sha256("\n".join([launch.launcher, *job]).encode()).hexdigest()[:24]
    return Path(tempfile.gettempdir()) / f"dualdist-{os.getuid()}-{digest}"


def _gather_patiently(
    launch: Launch, put: Set, look: Get, where: str, timeout: float, told: contextlib.ExitStack
) -> Gather:
    def tell(key: str, text: str) -> None:
        told.callback(put, key, None)
        put(key, text)

    def get(key: str) -> str:
        deadline = time.monotonic() + timeout
        while (answer := look(key)) is None:
            if time.monotonic() > deadline:
                raise ConfigurationError(
                    f"Rank {launch.rank} waited {timeout:.0f} s for rank {key.rpartition('.')[2]} at {where}. "
                    "Look at that rank's output; every process must call dualdist.init()."
                )
            time.sleep(_POLL_SECONDS)
        return answer

    return gather_through(launch.rank, launch.size, tell, get)
