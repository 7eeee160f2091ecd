"""PMIx, which carries small messages between the processes of a job without MPI: https://pmix.org.

MPI can start only once in a job's processes, also if another program runs in them afterwards. PMIx can start again. So
a process that will become another program uses PMIx alone, and leaves MPI to that program.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator, Mapping
from typing import Any

from ..errors import ConfigurationError
from ..executor import in_time
from ..types import Launch
from .boards import PublishedBoard

NAMESPACE = "PMIX_NAMESPACE"
"""A launcher that serves PMIx sets it."""

_STORE = "PMIX_MCA_gds"
"""Where a client keeps data. Only with "hash" can a second one start in the same process, with the same value."""
_LIBRARIES = ("libpmix.so.2", "libpmix.so")
_KEY = ctypes.create_string_buffer(b"dualdist.rank0", 512)
_STRING, _UINT32 = 3, 14
_EVERYBODY = ctypes.c_uint8(3)
"""The scope PMIX_GLOBAL."""
_ANY_RANK = 0xFFFFFFFE
"""PMIX_RANK_WILDCARD: facts about the whole job."""


class _Process(ctypes.Structure):
    """pmix_proc_t."""

    _fields_ = (("namespace", ctypes.c_char * 256), ("rank", ctypes.c_uint32))


class _Data(ctypes.Union):
    _fields_ = (("string", ctypes.c_char_p), ("uint32", ctypes.c_uint32), ("other", ctypes.c_char * 64))


class _Value(ctypes.Structure):
    """pmix_value_t."""

    _fields_ = (("type", ctypes.c_uint16), ("data", _Data))


class Pmix:
    """The connection of this process to its PMIx server."""

    def __init__(self) -> None:
        """Raises ConfigurationError without a library or a server."""
        self._library = _library()
        self._own = _Process()
        os.environ[_STORE] = "hash"
        self._check("PMIx_Init", ctypes.byref(self._own), None, ctypes.c_size_t(0))

    def close(self) -> None:
        self._library.PMIx_Finalize(None, ctypes.c_size_t(0))

    def job_size(self) -> int:
        """Return the number of processes of the job."""
        value = self._get(_ANY_RANK, ctypes.create_string_buffer(b"pmix.job.size", 512))
        return int(value.data.uint32) if value.type == _UINT32 else 0

    def publish(self, text: str) -> None:
        """Let all processes of the job read `text`."""
        value = _Value(_STRING, _Data(string=text.encode()))
        self._check("PMIx_Put", _EVERYBODY, _KEY, ctypes.byref(value))
        self._check("PMIx_Commit")

    def read(self) -> str:
        """Return what rank 0 has published. Waits until it has."""
        return str(self._get(0, _KEY).data.string.decode())

    def _get(self, rank: int, key: Any) -> _Value:
        process, found = _Process(self._own.namespace, rank), ctypes.POINTER(_Value)()
        self._check("PMIx_Get", ctypes.byref(process), key, None, ctypes.c_size_t(0), ctypes.byref(found))
        return found.contents

    def _check(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, name)(*arguments)
        if status:
            raise ConfigurationError(
                f"{name} must succeed in a process that serves PMIx, but returns {status}. Set MASTER_ADDR and "
                "MASTER_PORT for every process, so that PMIx is not needed."
            )


def _library() -> ctypes.CDLL:
    for name in _LIBRARIES:
        with contextlib.suppress(OSError):
            return ctypes.CDLL(name)
    raise ConfigurationError(
        f"{_LIBRARIES[0]} must be installed where the processes of several hosts meet through PMIx, but is not found. "
        "Load the module of your MPI or PMIx, or set MASTER_ADDR and MASTER_PORT for every process."
    )


@contextlib.contextmanager
def connected_pmix() -> Iterator[Pmix]:
    """Within the block, this process is a client of its PMIx server.

    After an error it stays one: the process ends, and the launcher sees that it has failed.
    """
    pmix = Pmix()
    yield pmix
    pmix.close()


class PmixBoard(PublishedBoard):
    """What rank 0 publishes with PMIx."""

    def __init__(self, launch: Launch, env: Mapping[str, str], pmix: Pmix) -> None:
        super().__init__(launch, env)
        self._pmix = pmix

    def write(self, text: str) -> None:
        self._pmix.publish(text)

    def read(self, seconds: float) -> str | None:
        with contextlib.suppress(TimeoutError):
            return in_time(self._pmix.read, seconds)
        return None
