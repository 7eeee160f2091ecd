"""The environment variables with which Horovod starts, besides those of its Gloo controller: rendezvous.py has them."""

from __future__ import annotations

from collections.abc import Mapping

from ...launch.copies import names_of_copies

__all__ = ("start_variables",)

_YIELD = "OMPI_MCA_mpi_yield_when_idle"


def start_variables(env: Mapping[str, str], transport: str | None) -> dict[str, str | None]:
    """Return the variables to set before Horovod starts, and None for those to unset.

    Horovod's background thread exchanges messages with the other ranks about once a millisecond. While it waits for
    them, Open MPI polls, and takes the core from the thread that trains. By default, it yields only with more processes
    than slots; the variable lets it always yield.

    env: the environment of the process. transport: as in `init`; with None, Horovod chooses its controller.
    """
    variables: dict[str, str | None] = dict.fromkeys(names_of_copies(env))
    variables |= {"HOROVOD_DYNAMIC_PROCESS_SETS": "1", "HOROVOD_TIMELINE": None}
    if _YIELD not in env:
        variables[_YIELD] = "1"
    if transport == "mpi":
        variables |= {"HOROVOD_CONTROLLER": "mpi", "HOROVOD_CPU_OPERATIONS": "mpi"}
    return variables
