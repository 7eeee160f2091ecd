"""dualdist.spawn: runs a function in several new processes of this machine.

The processes are those of multiprocessing's start method "spawn": they inherit only what is pickled. A supervisor
starts and ends them as it does for `dualdist run`, so none is left behind, not even when this process is killed.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import spawn as multiprocessing_spawn
from typing import Any, TypeVar

import torch

from ..backends import check_transport, load
from ..checks import configuration, function, integer, items, mapping, number, text
from ..errors import ConfigurationError
from ..launch import SPAWN
from ..launch.environment import process_variables, without_launchers
from ..rendezvous import LOOPBACK
from ..rendezvous.keyvalue import KeyValueServer
from . import spawn_child
from .agent_connection import AGENT_COMMAND, HostJob, Process
from .hosts import Slot
from .spawn_results import Result, results_of
from .supervisor import Supervisor
from .unchanged_scripts import serve_unchanged_scripts
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
    return _run(_pickled_task(fn, tuple(given)), size, variables | dict(variables_of_user), timeout)


def _run(task: bytes, size: int, variables: Mapping[str, str], timeout: float | None) -> list[Any]:
    """Run `task` in `size` processes and return the results. variables: to add to this process's environment."""
    secret = secrets.token_bytes(32)
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(KeyValueServer(LOOPBACK, secret=secret))
        slots = [Slot(rank, "localhost", rank, size) for rank in range(size)]
        copies = stack.enter_context(serve_unchanged_scripts(slots, LOOPBACK, None, variables))
        source = stack.enter_context(tempfile.TemporaryFile())
        source.write(task)
        source.flush()
        results = [stack.enter_context(Result(rank)) for rank in range(size)]
        rendezvous = f"{LOOPBACK}:{server.port}"
        processes = [
            Process(
                rank,
                _argv(source.fileno(), result.writer),
                {**copies[rank], **process_variables(SPAWN, rank, size, rank, size, rendezvous, secret)},
                (source.fileno(), result.writer),
            )
            for rank, result in enumerate(results)
        ]
        output = (os.dup(1), os.dup(2))
        for copy in output:
            stack.callback(os.close, copy)
        environment = without_launchers(os.environ) | dict(variables)
        host_job = HostJob("localhost", AGENT_COMMAND, processes, environment, output=output)
        return results_of(results, stack.enter_context(Supervisor([host_job])), timeout)


def _pickled_task(fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    """Return what spawn_child.py needs to prepare its process and to call `fn(*args)`."""
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    # Whether the main module was typed into a prompt or a notebook, or read from the standard input.
    typed = file is None or not os.path.exists(file)
    if typed and getattr(fn, "__module__", None) == "__main__":
        raise ConfigurationError(
            f"`fn` must be a function that a new process can import, but {fn!r} comes from a prompt, a "
            "notebook or the standard input instead. Write it in a module."
        )
    try:
        work = pickle.dumps((fn, args))
    except Exception as error:
        raise ConfigurationError(
            f"`fn` and `args` must be objects that can be pickled, but pickling failed: {error}. "
            "Use a function at the top of a module, and arguments that can be copied."
        ) from error
    preparation = multiprocessing_spawn.get_preparation_data("dualdist")
    if typed:
        preparation.pop("init_main_from_path", None)
    # The original type, AuthenticationString, refuses to be pickled.
    preparation["authkey"] = bytes(preparation["authkey"])
    return pickle.dumps((preparation, work))


def _argv(task: int, result: int) -> list[str]:
    """Return the command of a process. task, result: the open files from which it reads and to which it writes."""
    # The interpreter's own flags, as multiprocessing passes them on.
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    path = os.path.abspath(spawn_child.__file__)
    code = (
        "import sys\nwith open(sys.argv[1], 'rb') as f: s = f.read()\nexec(compile(s, sys.argv[1], 'exec'))"
    )
    return [sys.executable, *flags, "-c", code, path, str(task), str(result)]
