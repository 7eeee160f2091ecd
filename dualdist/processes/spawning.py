"""dualdist.spawn: training in several processes of this machine by one call."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from ..backends import check_transport, load
from ..errors import ConfigurationError
from .spawn import spawn_processes

__all__ = ("spawn",)

T = TypeVar("T")


def spawn(
    fn: Callable[..., T],
    args: Sequence[Any] = (),
    nprocs: int | None = None,
    *,
    backend: str | None = None,
    transport: str | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float | None = None,
) -> list[T]:
    """Run `fn(*args)` in `nprocs` fresh processes of this machine and return what it returned, in rank order.

    fn: a function of a module or of the script, which calls `dualdist.init()` as under every launcher; it, `args` and
    the results are pickled. nprocs: the number of GPUs when None, or 1 without a GPU. env: variables to set in the
    processes. timeout: seconds for the whole.

    The first exception on any rank is raised here, as the same type, with the rank's traceback as its cause; the other
    processes are ended. Raises ProcessEndedError when a process dies without an exception, TimeoutError after
    `timeout`, and ConfigurationError, before anything starts, for what cannot be pickled or started.
    """
    size = max(1, torch.cuda.device_count()) if nprocs is None else nprocs
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise ConfigurationError(
            f"`nprocs` must be a whole number of at least 1, but is {nprocs!r} instead. Give the number of processes."
        )
    check_transport(transport)
    if transport == "mpi":
        raise ConfigurationError(
            "`transport` must be nccl or gloo, but is 'mpi' instead: spawn does not start MPI. Start with mpirun."
        )
    if backend is not None:
        load(backend)
    chosen = {"DUALDIST_BACKEND": backend, "DUALDIST_TRANSPORT": transport}
    variables = {name: value for name, value in chosen.items() if value is not None} | dict(env or {})
    return spawn_processes(fn, tuple(args), size, {**os.environ}, variables, timeout)
