"""dualdist.run and dualdist.spawn: a function runs in new processes, on one host or several.

The processes are started as by `dualdist run`, inherit only what is pickled, and end with the call, even when this
process is killed. Elastic jobs need a launcher.
"""

from __future__ import annotations

import importlib.util
import math
import operator
import os
import pickle
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import spawn as multiprocessing_spawn
from typing import Any, TypeVar

from ..core.backends import check_transport, load
from ..core.checks import configuration, flag, function, integer, items, mapping, number, path, text
from ..core.launch import DUALDIST_RUN, SPAWN
from ..errors import ConfigurationError, ProcessEndedError
from . import spawn_child
from .agent import ENDED, LOST, RESULT
from .hosts import MOST_PROCESSES, Host, backend_variables, parse_hosts, read_hostfile
from .job import Event, RunOptions, describe_exit, read_start_timeout, started

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
    """Run `fn(*args)` in `nprocs` new processes of this machine and return the results, in rank order. Local.

    If a rank raises an exception, the first one is raised here, with the same type and the rank's traceback as its
    cause, and the other processes are ended.

    Args:
        fn: a function of a module or of the script. It calls `dualdist.init()`, as under every launcher.
        args: its arguments. `fn`, `args` and the results are pickled.
        nprocs: None: the number of GPUs, or 1 without a GPU.
        backend, transport: as in `init()`.
        env: variables to set in the processes.
        timeout: seconds until all must have returned.

    Raises:
        ProcessEndedError: a process died without an exception.
        TimeoutError: after `timeout`.
        ConfigurationError: before anything starts, for arguments that are wrong or cannot be pickled.
    """
    with configuration():
        if nprocs is None:
            from ..core import accelerator  # imports torch

            nprocs = max(1, accelerator.count())
        size = _size("nprocs", nprocs)
        options = RunOptions(
            child_command(),
            [Host("localhost", size)],
            size,
            _variables(backend, transport, [], env, SPAWN),
            launcher=SPAWN,
            task=_pickled_call("fn", fn, args, {}, by_value=False),
            has_own_output=False,
        )
    return _results(options, timeout)


_ELASTIC = (
    "dualdist.run starts a fixed number of processes. Write the function as a script with dualdist.elastic.run, "
    "and start it with torchrun or horovodrun."
)
_OF_ELASTIC = "min_num_proc max_num_proc slots reset_limit cooldown_range host_discovery_script min_np max_np"
_REFUSED = {
    **dict.fromkeys(_OF_ELASTIC.split(), _ELASTIC),
    "use_mpi": "dualdist.run does not start MPI, and use_gloo and use_mpi cannot both be set. Leave it out to use "
    "Gloo, or start a script with mpirun.",
}
"""Parameter of `run` that must not be set -> why, and what to do instead."""


def run(
    func: Callable[..., T],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int = 1,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    slots: int | None = None,
    reset_limit: int | None = None,
    cooldown_range: Sequence[int] | None = None,
    hosts: str | None = None,
    hostfile: str | os.PathLike[str] | None = None,
    host_discovery_script: str | None = None,
    start_timeout: float | None = None,
    ssh_port: int | None = None,
    ssh_identity_file: str | os.PathLike[str] | None = None,
    disable_cache: bool | None = None,
    output_filename: str | os.PathLike[str] | None = None,
    verbose: int | None = None,
    use_gloo: bool | None = None,
    use_mpi: bool | None = None,
    mpi_args: str | None = None,
    network_interface: str | None = None,
    network_interfaces: Sequence[str] | None = None,
    executable: str | os.PathLike[str] | None = None,
    np: int | None = None,
    min_np: int | None = None,
    max_np: int | None = None,
    *,
    backend: str | None = None,
    transport: str | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float | None = None,
) -> list[T]:
    """Run `func(*args, **kwargs)` in `num_proc` new processes and return the results, in rank order. Local.

    `func` calls `dualdist.init()`, as under every launcher. With cloudpickle installed, it may be a function of a
    notebook, a function of the script (which needs no `__main__` guard) or a lambda; else it must be at the top of a
    module. The parameters up to `max_np` are those of horovod.run (horovod/runner/__init__.py).

    If a rank raises an exception, the first one is raised here, with the same type and the rank's traceback as its
    cause, and the other processes are ended.

    Args:
        hosts, hostfile: as in `dualdist run -H host1:2,host2:2` and `--hostfile`. None: this host.
        start_timeout: seconds until each host must answer. None: HOROVOD_START_TIMEOUT, else 30.
        ssh_port, ssh_identity_file, network_interfaces: as the options of `dualdist run`.
        output_filename: a folder; the output is also written to DIR/rank.N/stdout and stderr.
        verbose: report the start of each process.
        executable: the Python interpreter of the processes. None: this one.
        network_interface, np: deprecated names of network_interfaces (separated by commas) and num_proc.
        disable_cache, use_gloo, mpi_args: no effect, because nothing is cached, and MPI is never started.
        backend, transport: as in `init()`. env: variables to set in the processes. timeout: seconds until all must have
            returned.

    Raises:
        ProcessEndedError: a process died without an exception.
        TimeoutError: after `timeout`, or a host did not answer.
        ConfigurationError: before anything starts, for arguments that are wrong, cannot be pickled or are not supported
            (`use_mpi`, and those of elastic jobs).
    """
    given = dict(locals())
    for name, why in _REFUSED.items():
        if given[name] is not None and not (name == "use_mpi" and given[name] is False):
            raise ConfigurationError(f"`{name}` must not be set, but is {given[name]!r} instead: {why}")
    with configuration():
        if use_gloo is not None:
            flag("use_gloo", use_gloo)
        if np is not None:
            _deprecated("np", "num_proc")
        size = _size("num_proc", num_proc) if np is None else _size("np", np)
        if start_timeout is None:
            start_timeout = read_start_timeout(None, os.environ)
        options = RunOptions(
            child_command(None if executable is None else str(path("executable", executable))),
            _hosts(hosts, hostfile, size),
            size,
            _variables(backend, transport, _interfaces(network_interface, network_interfaces), env, DUALDIST_RUN),
            None if output_filename is None else path("output_filename", output_filename),
            ssh_port=None if ssh_port is None else integer("ssh_port", ssh_port, least=1, below=1 << 16),
            ssh_identity=None if ssh_identity_file is None else str(path("ssh_identity_file", ssh_identity_file)),
            start_timeout=number("start_timeout", start_timeout, above=0, fix="Pass seconds."),
            verbose=verbose is not None
            and integer("verbose", int(verbose) if isinstance(verbose, bool) else verbose, least=0) > 0,
            task=_pickled_call("func", func, args, {} if kwargs is None else kwargs, by_value=True),
        )
    return _results(options, timeout)


def _deprecated(name: str, instead: str) -> None:
    warnings.warn(f"{name} is deprecated, use {instead} instead", DeprecationWarning, stacklevel=4)


def _size(name: str, value: Any) -> int:
    return integer(name, value, least=1, below=MOST_PROCESSES, fix="Give the number of processes.")


def _interfaces(network_interface: Any, network_interfaces: Any) -> list[str]:
    if network_interface is not None:
        _deprecated("network_interface", "network_interfaces")
        return text("network_interface", network_interface, "Pass names such as 'eth0,eth1'.").split(",")
    if network_interfaces is None:
        return []
    fix = "Pass a list such as ['eth0']."
    names = items("network_interfaces", network_interfaces, "a list of names", fix)
    return [text(f"network_interfaces[{place}]", name, fix) for place, name in enumerate(names)]


def _hosts(hosts: str | None, hostfile: Any, num_proc: int) -> list[Host]:
    if hosts is not None and hostfile is not None:
        raise ValueError("`hosts` and `hostfile` cannot be given together. Leave one out.")
    if hosts is not None:
        return parse_hosts(text("hosts", hosts, "Pass a string such as 'host1:2,host2:2'."))
    if hostfile is not None:
        return read_hostfile(path("hostfile", hostfile), "hostfile")
    return [Host("localhost", num_proc)]


def _variables(
    backend: str | None, transport: str | None, interfaces: list[str], env: Any, launcher: str
) -> dict[str, str]:
    if backend is not None:
        load(text("backend", backend))
    check_transport(transport)
    found = backend_variables(backend, transport, interfaces, option="transport", launcher=launcher)
    fix = "Pass names and values as strings."
    for name, value in mapping("env", {} if env is None else env, fix=fix).items():
        found[text("env", name)] = text(f"env[{name!r}]", value)
    return found


# A function and its arguments in the form in which spawn_child.py receives them, and the command that runs it.

_INSTALL = "install cloudpickle (pip install cloudpickle) and use dualdist.run"


def _pickled_call(name: str, called: Any, args: Any, kwargs: Any, *, by_value: bool) -> bytes:
    """Return what spawn_child.py needs to prepare its process and to call `called(*args, **kwargs)`.

    name: that of the parameter `called`, for errors. by_value: send functions of the main module, and functions that
    have no name of their own, with cloudpickle if it is installed. Then the processes do not import the main module.
    Raises ConfigurationError for what cannot be pickled.
    """
    function(name, called, "Pass a function that a new process can import.")
    given = items("args", args, "a tuple or list", "Put a single argument into a tuple: (x,).")
    named = dict(mapping("kwargs", kwargs, fix="Pass names and values."))
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    # Whether the main module was typed into a prompt or a notebook, or read from the standard input.
    typed = file is None or not os.path.exists(file)
    by_value = by_value and importlib.util.find_spec("cloudpickle") is not None
    if typed and not by_value and getattr(called, "__module__", None) == "__main__":
        raise ConfigurationError(
            f"`{name}` must be a function that a new process can import, but {called!r} comes from a prompt, a "
            f"notebook or the standard input instead. Write it in a module, or {_INSTALL}."
        )
    try:
        pickler: Any = importlib.import_module("cloudpickle") if by_value else pickle
        work = pickler.dumps((called, tuple(given), named))
    except Exception as error:
        raise ConfigurationError(
            f"`{name}` and its arguments must be objects that can be pickled, but pickling failed: {error}. Use a "
            f"function at the top of a module and arguments that can be copied{'' if by_value else f', or {_INSTALL}'}."
        ) from error
    try:
        preparation = multiprocessing_spawn.get_preparation_data("dualdist")
    except RuntimeError:
        raise RuntimeError(
            "dualdist.spawn must be called under `if __name__ == '__main__':`, but is called while a new process "
            "imports the script. Put the guard before the call."
        ) from None
    if typed or by_value:
        for field in ("init_main_from_path", "init_main_from_name"):
            preparation.pop(field, None)
    # The original type, AuthenticationString, refuses to be pickled.
    preparation["authkey"] = bytes(preparation["authkey"])
    return pickle.dumps((preparation, work))


def child_command(executable: str | None = None) -> list[str]:
    """Return the command of a process. The agent adds two arguments: the open files of the task and of the result."""
    # The interpreter's own flags, as multiprocessing passes them on.
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    path = os.path.abspath(spawn_child.__file__)
    code = "import sys\nwith open(sys.argv[1], 'rb') as f: s = f.read()\nexec(compile(s, sys.argv[1], 'exec'))"
    return [executable or sys.executable, *flags, "-c", code, path]


# The results of the processes, or the first failure among them.

_SETTLE_SECONDS = 0.2
"""How long to wait for other failures after one: the first to be reported is not always the first to happen."""
_REAPING_SECONDS = 0.02
"""The reported time of a death may be late by this much. Other ranks may raise meanwhile, because of it."""


def _results(options: RunOptions, timeout: float | None) -> list[Any]:
    """Run a job of spawn_child.py's processes, and return what they returned, in rank order.

    Raises the first failure of a rank, TimeoutError after `timeout` seconds or when a host does not answer, and
    ConfigurationError, before it starts anything, when the options do not fit the hosts.
    """
    with configuration():
        fix = "Pass seconds, or None."
        limit = math.inf if timeout is None else number("timeout", timeout, above=0, fix=fix)
    with started(options, os.environ) as job:
        deadline = time.monotonic() + limit
        ranks = [_Rank(rank, len(job.running)) for rank in sorted(job.running)]

        def wait(until: float) -> list[_Failure]:
            for event in job.wait(until):
                ranks[event.rank].add(event, is_here=job.agents[event.host].is_local)
            return [rank.failure for rank in ranks if rank.failure is not None]

        while job.running:
            if failures := wait(deadline):
                settled = time.monotonic() + _SETTLE_SECONDS
                while job.running and time.monotonic() < settled:
                    failures = wait(settled)
                raise min(failures, key=operator.itemgetter(0))[1]
            silent = job.silent_hosts(f"`start_timeout`={options.start_timeout:g} s")
            if silent is not None:
                raise TimeoutError(f"{silent}. All processes were ended.")
            if job.running and time.monotonic() >= deadline:
                raise TimeoutError(
                    f"All processes must return within `timeout`={limit:g} s, but ranks {sorted(job.running)} still "
                    "ran. They were ended. Give them more time, or look at what they wait for."
                )
        return [pickle.loads(rank.returned) for rank in ranks]


class _RankTraceback(Exception):
    """The traceback of a rank, the cause of the exception that the caller gets."""

    def __str__(self) -> str:
        return f"\n\n{self.args[0]}"


_Failure = tuple[float, BaseException]
"""When it happened, on the clock time.monotonic(), and what the caller gets."""


class _Rank:
    """What one rank has reported: the message of spawn_child.py, and its exit."""

    def __init__(self, rank: int, size: int) -> None:
        self.returned = b""
        """The pickled result, once it has arrived."""
        self.failure: _Failure | None = None
        self._rank, self._size = rank, size
        self._data = bytearray()

    def add(self, event: Event, *, is_here: bool) -> None:
        """Follow an event of this rank. is_here: whether it runs on this machine, so that its clock is this one's."""
        if event.kind == RESULT:
            self._data += event.data
            if len(self._data) == 8 + int.from_bytes(self._data[:8], "big"):
                kind, moment, content = pickle.loads(memoryview(self._data)[8:])
                self._data.clear()
                if kind == spawn_child.RETURNED:
                    self.returned = content
                else:
                    self.failure = self._raised(moment if is_here else time.monotonic(), *content)
        elif event.kind in (ENDED, LOST) and self.failure is None:
            if not self.returned or event.facts.get("code") != 0:
                self.failure = self._died(event)

    def _raised(self, moment: float, pickled: bytes | None, text: str) -> _Failure:
        """Return the failure of a rank that has sent its exception, or only the text of it."""
        if pickled is None:
            line = text.strip().splitlines()[-1]
            error: BaseException = ProcessEndedError(f"Rank {self._rank} raised {line}", self._rank, None)
        else:
            error = pickle.loads(pickled)
        error.__cause__ = _RankTraceback(f"Rank {self._rank} of {self._size}:\n{text}")
        return moment, error

    def _died(self, exit: Event) -> _Failure:
        error, code = exit.facts.get("error"), exit.facts.get("code")
        if exit.kind == LOST:
            how = f"is lost with its host {exit.host}: {error}"
        elif error is not None:
            how = f"could not be started: {error}"
        else:
            how = f"{describe_exit(code or 0)} {'after' if self.returned else 'before'} its function returned"
        moment = exit.facts.get("time", time.monotonic()) - _REAPING_SECONDS
        text = f"Rank {self._rank} of {self._size} {how}; the others were ended. Look at its output."
        return moment, ProcessEndedError(text, self._rank, code)
