"""The transport that all ranks use, agreed before any of them chooses a device."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from ..errors import ConfigurationError
from ..launch import DeviceView, choose_devices, shared_devices
from .transports import TRANSPORTS

__all__ = ("Offer", "agreed_transport")

logger = logging.getLogger("dualdist")

_FALLBACK = "gloo"
"""Every host has it."""


@dataclass(frozen=True)
class Offer(DeviceView):
    """What a rank reports before the transport is chosen."""

    transport: str
    """The fastest transport of this rank, or the one that the user asks for."""
    is_asked: bool

    def to_text(self) -> str:
        """Return the offer as a line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> Offer:
        """Return the offer from which `to_text` made `text`."""
        return cls(**json.loads(text))


def agreed_transport(offers: Sequence[Offer], rank: int) -> str:
    """Return the transport for all ranks. offers: of all ranks, in rank order. rank: of this process.

    It is the one that a user asks for, else the fastest of all ranks if it is the same, else gloo, of which rank 0
    warns. Raises ConfigurationError on every rank when users ask for different ones, or when processes would share a
    device with a transport that needs one for each.
    """
    asked = {offer.transport: other for other, offer in reversed(list(enumerate(offers))) if offer.is_asked}
    if len(asked) > 1:
        said = ", ".join(f"rank {other} asks for {name!r}" for name, other in asked.items())
        raise ConfigurationError(f"`transport` must be equal on all ranks, but {said}. Choose one of them.")
    transports = set(asked) or {offer.transport for offer in offers}
    transport = transports.pop() if len(transports) == 1 else _FALLBACK
    if transports and rank == 0:
        hosts = {name: _hosts(offers, name) for name in sorted({offer.transport for offer in offers})}
        said = "; ".join(f"{name} on {', '.join(names)}" for name, names in hosts.items())
        logger.warning("All ranks use %s, because their fastest transports differ: %s.", transport, said)
    if TRANSPORTS[transport].needs_gpus:
        _check_devices(offers, transport)
    return transport


def _check_devices(offers: Sequence[Offer], transport: str) -> None:
    chosen = choose_devices(offers)
    for other, index in enumerate(chosen):
        if index is None:
            raise ConfigurationError(
                f"`transport` is {transport!r}, but rank {other} on {_shown(offers[other].host)} sees no GPU. "
                "Choose gloo, or leave its host out."
            )
    for host, ranks, devices in shared_devices(offers, chosen):
        raise ConfigurationError(
            f"`transport` is {transport!r}, which needs a GPU for each process, but the {ranks} processes on "
            f"{_shown(host)} share {devices}. Start fewer processes there, or set DUALDIST_TRANSPORT=gloo to let them "
            "share."
        )


def _hosts(offers: Sequence[Offer], transport: str) -> list[str]:
    return sorted({_shown(offer.host) for offer in offers if offer.transport == transport})


def _shown(host: str) -> str:
    """Return the host's own name from that of `own_node`."""
    return host.rpartition("-")[0] or host
