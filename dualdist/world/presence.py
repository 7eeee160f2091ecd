"""What each rank reports about itself when it has joined a world."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass

from .. import accelerator
from ..agreement.status import Contact
from ..launch import DeviceView
from ..rendezvous import own_node
from .cpu_threads import CpuThreads

__all__ = ("Presence",)

_BYTES = 512
"""The length of a report. All have the same, padded with spaces."""


@dataclass(frozen=True)
class Presence:
    """Where a rank runs, and what it has there."""

    host: str
    local_rank: int | None
    contact: Contact | None
    threads: CpuThreads
    devices: tuple[str, int]
    """A name for the set of devices that the rank sees, and their number."""
    master: tuple[str, int] | None
    """On rank 0: its address, and a port that is free on its host."""

    @classmethod
    def of_this_process(
        cls, local_rank: int | None, contact: Contact | None, master: tuple[str, int] | None
    ) -> Presence:
        """Return the report of this process."""
        names = accelerator.visible()
        devices = hashlib.sha256(repr(names).encode()).hexdigest()[:8], len(names)
        return cls(own_node(), local_rank, contact, CpuThreads.of_this_process(), devices, master)

    def to_bytes(self) -> bytes:
        """Return the report as JSON."""
        return json.dumps(asdict(self)).encode().ljust(_BYTES)

    @classmethod
    def from_bytes(cls, data: bytes) -> Presence:
        """Return the report from which `to_bytes` made `data`."""
        host, local_rank, contact, threads, (name, count), master = json.loads(data).values()
        contact = contact and Contact(*contact)
        return cls(host, local_rank, contact, CpuThreads(*threads), (name, count), master and (*master,))

    @property
    def view(self) -> DeviceView:
        """What is needed to choose the rank's device."""
        name, count = self.devices
        return DeviceView(self.host, self.local_rank, [f"{name}.{index}" for index in range(count)])
