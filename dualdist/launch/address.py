"""Finding the first address: rank 0 publishes 'host:port', the others read it, before any engine runs.

torchrun and `init_method` give an address; the other launchers do not, so it travels by what they have: horovodrun's
key-value server (plain HTTP, horovod/runner/http/http_server.py), MPI, or a file when all processes share a node.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import os
import socket
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path

from ..errors import ConfigurationError
from ..types import Launch
from . import mpi
from .keyvalue import KeyValueStore

__all__ = ("exchange_address", "own_address")

_POLL_SECONDS = 0.02


def exchange_address(
    launch: Launch, env: Mapping[str, str], key: str, serve: Callable[[str], int], timeout: float
) -> tuple[str, int]:
    """Return the (host, port) at which rank 0 serves. Collective over the launched processes.

    serve: called on rank 0 with the host name that the others will use; binds and returns the port.
    key: tells this exchange from earlier ones of the same job. timeout: seconds to wait for rank 0.
    Raises ConfigurationError when this launcher offers no way to exchange an address here.
    """
    single_node = launch.local_size == launch.size or launch.size == 1
    if env.get("DUALDIST_RENDEZVOUS"):
        launcher, port = _split(env["DUALDIST_RENDEZVOUS"])
        host = "127.0.0.1" if single_node else own_address(launcher)
        with KeyValueStore(launcher, port, bytes.fromhex(env.get("DUALDIST_SECRET", ""))) as store:
            return _through_key_value(launch, store, key, host, serve, timeout)
    if env.get("HOROVOD_GLOO_RENDEZVOUS_ADDR"):
        server = f"{env['HOROVOD_GLOO_RENDEZVOUS_ADDR']}:{env['HOROVOD_GLOO_RENDEZVOUS_PORT']}"
        host = "127.0.0.1" if single_node else own_address(env["HOROVOD_GLOO_RENDEZVOUS_ADDR"])
        return _through_http(launch, f"http://{server}/dualdist/{key}", host, serve, timeout)
    if single_node:
        return _through_file(launch, _job_file(launch, env, key), serve, timeout)
    if mpi.world_size() == launch.size:
        return mpi.broadcast_address(socket.gethostbyname(socket.gethostname()), serve)
    raise ConfigurationError(
        f"World size is {launch.describe('size')} on several nodes, but no address of rank 0 is known. "
        "Install mpi4py (pip install 'dualdist[mpi]'), or set MASTER_ADDR and MASTER_PORT for every process."
    )


def own_address(host: str) -> str:
    """Return the IPv4 address by which this machine reaches `host`."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # a datagram socket: nothing is sent
        return str(probe.getsockname()[0])


def _through_key_value(
    launch: Launch, store: KeyValueStore, key: str, host: str, serve: Callable[[str], int], timeout: float
) -> tuple[str, int]:
    if launch.rank == 0:
        port = serve(host)
        store.set(key, f"{host}:{port}".encode())
        return host, port
    try:
        return _split(store.get(key, timeout).decode())
    except OSError as error:  # TimeoutError is one, and so is a launcher that has gone
        raise ConfigurationError(
            f"Rank {launch.rank} did not get rank 0's address from the launcher: {error}. "
            "Look at rank 0's output; every process must call dualdist.init()."
        ) from error


def _through_http(
    launch: Launch, url: str, host: str, serve: Callable[[str], int], timeout: float
) -> tuple[str, int]:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    if launch.rank == 0:
        port = serve(host)
        opener.open(
            urllib.request.Request(url, f"{host}:{port}".encode(), method="PUT"), timeout=timeout
        ).close()
        return host, port

    def read() -> str | None:
        try:
            with opener.open(url, timeout=timeout) as answer:
                return str(answer.read().decode())
        except urllib.error.HTTPError as error:
            if error.code == 404:  # not published yet
                return None
            raise

    return _split(_poll(read, launch, url, timeout))


def _job_file(launch: Launch, env: Mapping[str, str], key: str) -> Path:
    """Return a path that only the processes of this job know: named after the job's own server addresses."""
    job = [
        f"{name}={env[name]}"
        for name in sorted(env)
        if name.startswith(("PMIX_NAMESPACE", "PMIX_SERVER_URI", "PMI_FD"))
    ]
    job += [
        f"{name}={env[name]}"
        for name in ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
        if name in env
    ]
    if not job:
        job = [f"parent={os.getppid()}"]
    digest = hashlib.sha256("\n".join([launch.launcher, *job]).encode()).hexdigest()[:24]
    return Path(tempfile.gettempdir()) / f"dualdist-{os.getuid()}-{digest}-{key}"


def _through_file(launch: Launch, path: Path, serve: Callable[[str], int], timeout: float) -> tuple[str, int]:
    host = "127.0.0.1"
    if launch.rank == 0:
        port = serve(host)
        fresh = path.with_name(path.name + ".new")
        with contextlib.suppress(FileNotFoundError):
            fresh.unlink()
        with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as out:
            out.write(f"{host}:{port}")
        fresh.replace(path)
        atexit.register(lambda: path.unlink(missing_ok=True))
        return host, port
    return _split(_poll(lambda: path.read_text() if path.exists() else None, launch, str(path), timeout))


def _poll(read: Callable[[], str | None], launch: Launch, where: str, timeout: float) -> str:
    deadline = time.monotonic() + timeout
    while True:
        answer = read()
        if answer is not None:
            return answer
        if time.monotonic() > deadline:
            raise ConfigurationError(
                f"Rank {launch.rank} waited {timeout:.0f} s for rank 0's address at {where}. "
                "Look at rank 0's output; every process must call dualdist.init()."
            )
        time.sleep(_POLL_SECONDS)


def _split(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    return host, int(port)
