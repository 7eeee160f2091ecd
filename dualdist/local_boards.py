"""Where ranks meet: those of one host at a Unix socket, others at a file that init_method names."""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Mapping
from pathlib import Path

from .core.meeting import ADVICE, Board, PublishedBoard, ServerAddress, find_launcher_process
from .core.meeting.server import MeetingServer
from .core.types import Launch
from .errors import ConfigurationError

_IDS = ("PMIX_SERVER_URI", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
_WITH_IDS = ("OMPI_", "PMIX_", "JSM_", "SLURM_")
"""How the variables of launchers begin that set some of `_IDS`. Another launcher may run several jobs inside theirs."""


def job_digest(launch: Launch, env: Mapping[str, str]) -> str:
    """Return a text that is the same for all processes of this job on this host, and different for other jobs."""
    source = launch.sources.get("rank", "")
    names = () if source in env and not source.startswith(_WITH_IDS) else _IDS
    job = [f"{name}={env[name]}" for name in sorted(env) if name.startswith(names)]
    if not job:
        if os.readlink("/proc/self") != f"{os.getpid()}":
            raise ProcessLookupError  # /proc has the process IDs of another namespace
        job = [f"{part}" for part in find_launcher_process(source)]
    return hashlib.sha256("\n".join([launch.launcher, *job]).encode()).hexdigest()[:24]


class HostBoard(Board):
    """An abstract address of a Unix socket (unix(7)), at which rank 0 serves.

    It needs no file, so that processes with temporary folders of their own meet, too: each may be in a container.
    """

    advice = (
        f"{ADVICE} The processes of a host meet at a Unix socket: if each is in a container, share the host's "
        "network with all, or set MASTER_ADDR and MASTER_PORT for every process."
    )

    fix = "Look at rank 0's output."

    def __init__(self, name: str) -> None:
        self._address, self.where = f"\0{name}", f"the Unix socket @{name}"

    def serve(self, size: int) -> MeetingServer:
        try:
            return MeetingServer(size, [self._address], b"")
        except OSError as error:
            raise ConfigurationError(
                f"{self.where} must be free for rank 0, but is not ({error.strerror}). Give every process its own "
                "rank, or set MASTER_ADDR and MASTER_PORT for every process."
            ) from error

    def find(self, seconds: float) -> ServerAddress | None:
        with socket.socket(socket.AF_UNIX) as probe:
            probe.setblocking(False)  # another user's process may listen there, and accept nobody
            nobody = probe.connect_ex(self._address)
        return None if nobody else ServerAddress([self._address], [0], b"")


def host_board(launch: Launch, env: Mapping[str, str]) -> Board:
    """Return the board of this host for all processes of this job. Other jobs have other ones."""
    try:
        return HostBoard(f"dualdist-{os.getuid()}-{job_digest(launch, env)}")
    except OSError as error:
        raise ConfigurationError(
            f"The process that set {launch.sources['rank']} must be visible to those that it has started, which "
            "identify their job by it, but is not. Share the host's process IDs with containers, or set MASTER_ADDR "
            "and MASTER_PORT for every process."
        ) from error


_LONGEST = 1 << 20
"""How many characters of a file are read: more than an address has."""


class FileBoard(PublishedBoard):
    """A file of one line that belongs to this user, for init_method="file:///path" as in torch.distributed."""

    def __init__(self, launch: Launch, env: Mapping[str, str], path: Path) -> None:
        super().__init__(launch, env)
        self._path = path

    def write(self, text: str) -> None:
        self.read(0.0)
        with open(self._descriptor(os.O_WRONLY | os.O_TRUNC), "w") as file:
            file.write(f"{text}\n")

    def read(self, seconds: float) -> str | None:
        with open(self._descriptor(os.O_RDONLY), errors="replace") as file:
            text = file.read(_LONGEST)
        if text not in ("", "[") and not text.startswith('["'):  # no address, and no first part of one
            raise ConfigurationError(
                f"{self._path} must be a new file, or one that an earlier start has left, but has other content. "
                "Choose another file."
            )
        return text if text.endswith("\n") else None

    def clear(self) -> None:
        self._path.unlink(missing_ok=True)

    def _descriptor(self, mode: int) -> int:
        # On NFS, only opening it with O_CREAT shows at once whether another host has made it.
        descriptor = os.open(self._path, mode | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        if os.fstat(descriptor).st_uid != os.getuid():
            os.close(descriptor)
            raise ConfigurationError(
                f"{self._path} must be a file of this user, but is not. Remove it, or choose another file."
            )
        return descriptor
