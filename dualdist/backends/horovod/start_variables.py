"""The environment variables with which Horovod starts."""

from __future__ import annotations

from collections.abc import Mapping

from ...launch.copies import names_of_copies

__all__ = ("start_variables",)

_YIELD = "OMPI_MCA_mpi_yield_when_idle"


def start_variables(env: Mapping[str, str], transport: str | None) -> dict[str, str | None]:
    """Return the variables to set before Horovod starts, and None for those to unset.

    Horovod's thread waits in MPI for the other ranks about once a millisecond. Open MPI polls meanwhile, and leaves the
    core to the training's thread only if it yields, which it does by default only with more processes than slots.
    """
    variables: dict[str, str | None] = dict.fromkeys(names_of_copies(env))
    variables |= {"HOROVOD_DYNAMIC_PROCESS_SETS": "1", "HOROVOD_TIMELINE": None}
    if _YIELD not in env:
        variables[_YIELD] = "1"
    if transport == "mpi":
        variables |= {"HOROVOD_CONTROLLER": "mpi", "HOROVOD_CPU_OPERATIONS": "mpi"}
    return variables
