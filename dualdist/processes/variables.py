"""The variables by which the processes of `dualdist run` and `spawn` choose their backend and transport."""

from __future__ import annotations

from ..backends import TRANSPORTS
from ..errors import ConfigurationError

__all__ = ("backend_variables",)


def backend_variables(
    backend: str | None, transport: str | None, *, option: str, launcher: str
) -> dict[str, str]:
    """Return the variables that choose `backend` and `transport`; None leaves the choice to `init`.

    option, launcher: the names, for an error, of the transport's option and of what starts the processes.
    Raises ConfigurationError for a transport that needs MPI, which only other launchers start.
    """
    if transport is not None and TRANSPORTS[transport].needs_mpi:
        possible = [name for name, needs in TRANSPORTS.items() if not needs.needs_mpi]
        raise ConfigurationError(
            f"`{option}` must be {' or '.join(possible)}, but is {transport} instead: {launcher} does not start MPI. "
            "Start with mpirun."
        )
    chosen = {"DUALDIST_BACKEND": backend, "DUALDIST_TRANSPORT": transport}
    return {name: value for name, value in chosen.items() if value is not None}
