"""The environment variables with which Horovod starts, besides those of its Gloo controller: rendezvous.py has them."""

from __future__ import annotations

from collections.abc import Mapping

from ...launch.copies import names_of_copies

__all__ = ("start_variables",)

_FOR_MPI = {"OMPI_MCA_mpi_yield_when_idle": "1", "HOROVOD_CYCLE_TIME": "0.25"}
"""Horovod's background thread exchanges messages with the other ranks once in each cycle.

While it waits for them, Open MPI polls, and takes the core from the thread that trains. The first variable lets it
yield, which it otherwise does only with more processes than slots. The second is the length of a cycle in milliseconds.
Horovod's own, 1, lets the gradients of several layers wait for each other; here they are in a bucket, which only waits
for the cycle. Over Gloo an exchange takes longer, and shorter cycles make steps slower.
"""
_FUSION_THRESHOLD = "HOROVOD_FUSION_THRESHOLD"
_FUSED_BYTES = 8 << 20
"""Horovod copies tensors of one cycle into a buffer if they fit in it together, by default 128 MiB.

Here gradients are in buckets already. Two large ones that happened to be in one cycle would be copied again, into
memory that Horovod keeps: with two of 52 MB, a peak of 1.08 instead of 1.00 times that of torch's DDP.
"""


def start_variables(
    env: Mapping[str, str], transport: str | None, *, uses_mpi: bool
) -> dict[str, str | None]:
    """Return the variables to set before Horovod starts, and None for those to unset.

    Args:
        env: the environment of the process. What it sets for MPI or the fusion of tensors is kept.
        transport: as in `init`; with None, Horovod chooses its controller.
        uses_mpi: whether that is its MPI controller.
    """
    variables: dict[str, str | None] = dict.fromkeys(names_of_copies(env))
    variables |= {"HOROVOD_DYNAMIC_PROCESS_SETS": "1", "HOROVOD_TIMELINE": None}
    if uses_mpi:
        variables |= {name: value for name, value in _FOR_MPI.items() if name not in env}
    if not {_FUSION_THRESHOLD, "HOROVOD_AUTOTUNE"} & env.keys():  # autotuning leaves alone what is set
        variables[_FUSION_THRESHOLD] = str(_FUSED_BYTES)
    if transport == "mpi":
        variables |= {"HOROVOD_CONTROLLER": "mpi", "HOROVOD_CPU_OPERATIONS": "mpi"}
    return variables
