"""dualdist.spawn: runs a function in several new processes of this machine.

The processes are those of multiprocessing's start method "spawn": they inherit only what is pickled. A supervisor
starts and ends them as it does for `dualdist run`, so none is left behind, not even when this process is killed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from ..backends import check_transport, load
from ..checks import configuration, function, integer, items, mapping, number, text
from ..launch import SPAWN
from .function_task import child_command, pickled_task
from .hosts import Host
from .preparation import RunOptions
from .spawn_results import results_of_job
from .variables import backend_variables

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
    """Run `fn(*args)` in `nprocs` new processes of this machine and return the results, in rank order.

    fn: a function of a module or of the script. It calls `dualdist.init()`, as under every launcher. `fn`, `args` and
    the results are pickled. nprocs: by default the number of GPUs, or 1 without a GPU. env: variables to set in the
    processes. timeout: seconds until all must have returned.

    If a rank raises an exception, the first one is raised here, with the same type and the rank's traceback as its
    cause, and the other processes are ended. Raises ProcessEndedError when a process dies without an exception,
    TimeoutError after `timeout`, and ConfigurationError, before anything starts, for arguments that are wrong or cannot
    be pickled.
    """
    with configuration():
        size = max(1, torch.cuda.device_count()) if nprocs is None else nprocs
        size = integer("nprocs", size, least=1, below=1 << 16, fix="Give the number of processes.")
        function("fn", fn, "Pass a function that a new process can import.")
        given = items("args", args, "a tuple or list", "Put a single argument into a tuple: (x,).")
        variables_of_user = mapping(
            "env", {} if env is None else env, fix="Pass names and values as strings."
        )
        for name, value in variables_of_user.items():
            text("env", name)
            text(f"env[{name!r}]", value)
        if backend is not None:
            text("backend", backend)
        if timeout is not None:
            timeout = number("timeout", timeout, above=0, fix="Pass seconds, or None.")
    check_transport(transport)
    variables = backend_variables(backend, transport, option="transport", launcher=SPAWN)
    if backend is not None:
        load(backend)
    options = RunOptions(
        child_command(),
        [Host("localhost", size)],
        size,
        variables | dict(variables_of_user),
        launcher=SPAWN,
        task=pickled_task("fn", fn, given, {}, by_value=False),
    )
    with contextlib.ExitStack() as stack:
        output = (os.dup(1), os.dup(2))
        for copy in output:
            stack.callback(os.close, copy)
        return results_of_job(dataclasses.replace(options, descriptors=output), timeout)
