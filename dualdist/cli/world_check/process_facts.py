"""What each process reports about itself and its host."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import platform
import resource
import shutil
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from ... import accelerator
from ...errors import ConfigurationError
from ...rendezvous import interface_of, own_node
from ...types import Launch

__all__ = ("ProcessFacts", "digest", "versions")

_GPUS, _DRIVER = Path("/proc/driver/nvidia/gpus"), Path("/proc/driver/nvidia/version")
_MEMORY_LIMIT = Path("/sys/fs/cgroup/memory.max")
"""The limit of this process's control group (cgroup v2), in bytes or "max"."""


@dataclass(frozen=True)
class ProcessFacts:
    """One process, in the types of JSON."""

    rank: int
    node: str
    """A name that no other host has (own_node)."""
    host: str
    local_rank: int | None
    address: str
    """The IPv4 address at which the others reach this process."""
    interface: str
    versions: str
    """The digest of what `versions` returns."""
    backend: str
    """The backend that init() would choose, or the error that it would raise."""
    usable: bool
    """Whether init() could choose a backend."""
    devices: tuple[str, ...]
    """A name of each device that torch sees; the processes of a host use the same name for a device."""
    models: tuple[str, ...]
    """The model of each device that torch sees."""
    installed_gpus: int
    """The GPUs of the host that NVIDIA's driver lists, if torch was built for CUDA."""
    cpus: int
    threads: int
    memory: int
    """Bytes that the processes of the host may use."""
    shared_memory: int
    """Free bytes of /dev/shm."""
    open_files: int
    """How many files the process may open."""

    @classmethod
    def of_this_process(
        cls, launch: Launch, address: str, backend: str, usable: bool, found: Mapping[str, str]
    ) -> ProcessFacts:
        """Return the facts of this process. found: what `versions` returned."""
        devices = accelerator.visible()
        return cls(
            launch.rank,
            own_node(),
            socket.gethostname(),
            launch.local_rank,
            address,
            _interface(address),
            digest(found),
            backend,
            usable,
            devices,
            tuple(_model(index) for index in range(len(devices))),
            len(list(_GPUS.glob("*"))) if torch.version.cuda else 0,
            len(os.sched_getaffinity(0)),
            torch.get_num_threads(),
            _memory(),
            _free_shared_memory(),
            resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        )

    def to_json(self) -> str:
        """Return the facts as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> ProcessFacts:
        """Return the facts from which `to_json` made `text`."""
        facts = json.loads(text)
        return cls(**facts | {name: tuple(facts[name]) for name in ("devices", "models")})


def versions() -> dict[str, str]:
    """Return the version of Python, of torch's build, of NVIDIA's driver, and of every installed package. Local."""
    found: dict[str, str] = {}
    for package in importlib.metadata.distributions():
        # A package without a name is the rest of an incomplete removal.
        name = package.metadata["Name"] if package.metadata else None
        if name:
            # Python imports the first one on its path.
            found.setdefault(name.lower().replace("_", "-"), package.version)
    found |= {"Python": platform.python_version(), "torch": torch.__version__}
    if _DRIVER.exists():
        found["NVIDIA driver"] = _DRIVER.read_text().partition("\n")[0]
    return found


def digest(found: Mapping[str, str]) -> str:
    """Return a short text that is the same for the same versions."""
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()[:16]


def _interface(address: str) -> str:
    with contextlib.suppress(ConfigurationError):
        return interface_of(address)
    return ""


def _model(index: int) -> str:
    kind = accelerator.kind()
    assert kind is not None  # there is a device
    return str(torch.get_device_module(kind).get_device_name(index))


def _memory() -> int:
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with contextlib.suppress(OSError, ValueError):  # "max" is no number
        memory = min(memory, int(_MEMORY_LIMIT.read_text()))
    return memory


def _free_shared_memory() -> int:
    with contextlib.suppress(OSError):
        return shutil.disk_usage("/dev/shm").free
    return 0
