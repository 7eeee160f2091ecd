"""The transports that carry a backend's data, and what each one needs."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import ConfigurationError

__all__ = ("TRANSPORTS", "Transport", "check_transport")


@dataclass(frozen=True)
class Transport:
    """What a transport needs."""

    needs_gpus: bool = False
    """Whether each process needs a GPU of its own."""
    needs_mpi: bool = False
    """Whether a launcher that starts MPI must start the processes."""


TRANSPORTS = {
    "nccl": Transport(needs_gpus=True),
    "xccl": Transport(needs_gpus=True),
    "gloo": Transport(),
    "mpi": Transport(needs_mpi=True),
}


def check_transport(transport: str | None) -> None:
    """Raise ConfigurationError unless `transport` is None or the name of a transport."""
    if transport not in (None, *TRANSPORTS):
        raise ConfigurationError(
            f"`transport` must be one of {', '.join(TRANSPORTS)}, but is {transport!r} instead. "
            "Choose one of these, or leave it out to use the fastest one on this machine."
        )
