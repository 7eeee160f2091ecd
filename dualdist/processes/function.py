"""dualdist.run: runs a function in new processes on one host or several, as horovod.run does.

The processes are started as by `dualdist run`, and are ended with this call. Elastic jobs need a launcher.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import math
import os
import pickle
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import spawn as multiprocessing_spawn
from typing import Any, TypeVar, cast

import torch

from ..backends import check_transport, load
from ..checks import configuration, flag, function, integer, items, mapping, number, path, text
from ..errors import ConfigurationError, ProcessEndedError
from ..launch import DUALDIST_RUN, SPAWN
from . import spawn_child
from .agent import ENDED, RESULT, STARTED, STDERR, STDOUT
from .agent_connection import LOST, AgentConnection, Event, Supervisor, describe_exit
from .hosts import Host, backend_variables, parse_hostfile, parse_hosts
from .output import Output
from .starters import RunOptions, prepare

# A function and its arguments in the form in which spawn_child.py receives them, and the command that runs it.

_INSTALL = "install cloudpickle (pip install cloudpickle) and use dualdist.run"


def pickled_task(
    name: str, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], *, by_value: bool
) -> bytes:
    """Return what spawn_child.py needs to prepare its process and to call `function(*args, **kwargs)`.

    name: that of the parameter `function`, for errors. by_value: send functions of the main module, and functions that
    have no name of their own, with cloudpickle if it is installed. Then the processes do not import the main module.
    Raises ConfigurationError for what cannot be pickled.
    """
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    # Whether the main module was typed into a prompt or a notebook, or read from the standard input.
    typed = file is None or not os.path.exists(file)
    by_value = by_value and importlib.util.find_spec("cloudpickle") is not None
    if typed and not by_value and getattr(function, "__module__", None) == "__main__":
        raise ConfigurationError(
            f"`{name}` must be a function that a new process can import, but {function!r} comes from a prompt, a "
            f"notebook or the standard input instead. Write it in a module, or {_INSTALL}."
        )
    try:
        work = _dumps(by_value)((function, tuple(args), dict(kwargs)))
    except Exception as error:
        raise ConfigurationError(
            f"`{name}` and its arguments must be objects that can be pickled, but pickling failed: {error}. Use a "
            f"function at the top of a module and arguments that can be copied{'' if by_value else f', or {_INSTALL}'}."
        ) from error
    preparation = multiprocessing_spawn.get_preparation_data("dualdist")
    if typed or by_value:
        for field in ("init_main_from_path", "init_main_from_name"):
            preparation.pop(field, None)
    # The original type, AuthenticationString, refuses to be pickled.
    preparation["authkey"] = bytes(preparation["authkey"])
    return pickle.dumps((preparation, work))


def _dumps(by_value: bool) -> Callable[[Any], bytes]:
    if not by_value:
        return pickle.dumps
    import cloudpickle

    return cast("Callable[[Any], bytes]", cloudpickle.dumps)


def child_command(executable: str | None = None) -> list[str]:
    """Return the command of a process. The agent adds two arguments: the open files of the task and of the result."""
    # The interpreter's own flags, as multiprocessing passes them on.
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    path = os.path.abspath(spawn_child.__file__)
    code = (
        "import sys\nwith open(sys.argv[1], 'rb') as f: s = f.read()\nexec(compile(s, sys.argv[1], 'exec'))"
    )
    return [executable or sys.executable, *flags, "-c", code, path]


# The results of the processes of `run` and `spawn`, or the first failure among them.

_SETTLE_SECONDS = 0.2
"""How long to wait for other failures after one: the first to be reported is not always the first to happen."""
_REAPING_SECONDS = 0.02
"""The reported time of a death may be late by this much. Other ranks may raise meanwhile, because of it."""


class _RankTraceback(Exception):
    """The traceback of a rank, the cause of the exception that the caller gets."""

    def __str__(self) -> str:
        return f"\n\n{self.args[0]}"


@dataclass(frozen=True)
class _Failure:
    time: float
    rank: int
    error: BaseException
    cause: BaseException | None = None


class _Result:
    """The message of one rank from spawn_child.py, and the rank's exit."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.message: tuple[str, float, Any] | None = None
        """(kind, time, content), None until it is complete. time: on this machine's clock time.monotonic()."""
        self.exit: Event | None = None
        self._data = bytearray()

    def add(self, data: bytes, *, from_here: bool) -> None:
        """Add bytes of the message. from_here: whether the rank runs on this machine, so that its clock is ours."""
        self._data += data
        if len(self._data) >= 8 and len(self._data) == 8 + int.from_bytes(self._data[:8], "big"):
            kind, moment, content = pickle.loads(memoryview(self._data)[8:])
            self.message = (kind, moment if from_here else time.monotonic(), content)
            self._data.clear()


def results_of_job(options: RunOptions, timeout: float | None) -> list[Any]:
    """Run a job of spawn_child.py's processes, and return what they returned, in rank order.

    Raises the first failure of a rank, TimeoutError after `timeout` seconds or when a host does not answer, and
    ConfigurationError, before it starts anything, when the options do not fit the hosts.
    """
    with contextlib.ExitStack() as stack:
        host_jobs = stack.enter_context(prepare(options, os.environ))
        size = sum(len(host_job.processes) for host_job in host_jobs)
        output = None
        if options.descriptors is None:
            output = stack.enter_context(Output(size, options.output, timestamps=options.timestamps))
        supervisor = stack.enter_context(Supervisor(host_jobs))
        return _Collection(options, size, output, supervisor).follow(timeout)


class _Collection:
    """Collects the results, and writes the output if it is sent to this process."""

    def __init__(self, options: RunOptions, size: int, output: Output | None, supervisor: Supervisor) -> None:
        self._options = options
        self._results = [_Result(rank) for rank in range(size)]
        self._output = output
        self._supervisor = supervisor
        self._local = {agent.job.host for agent in supervisor.agents if agent.job.local}
        if output is not None:
            supervisor.watch(output.reader, output.empty_reader)

    def follow(self, timeout: float | None) -> list[Any]:
        """Wait until all processes have returned. Raise the first failure."""
        began = time.monotonic()
        start = began + self._options.start_timeout
        deadline = math.inf if timeout is None else began + timeout
        while not all(result.exit for result in self._results):
            silent = [agent for agent in self._supervisor.agents if not agent.greeted]
            left = min(deadline, start if silent else math.inf) - time.monotonic()
            if left <= 0:
                raise self._too_late(silent if time.monotonic() < deadline else [], timeout)
            self._handle(left)
            if _failures(self._results):
                self._settle()
                first = min(_failures(self._results), key=lambda failure: failure.time)
                raise first.error from first.cause
        return [_unpickled(result) for result in self._results]

    def _too_late(self, silent: Sequence[AgentConnection], timeout: float | None) -> TimeoutError:
        if silent:
            names = ", ".join(agent.job.host for agent in silent)
            errors = "; ".join(filter(None, (agent.errors() for agent in silent)))
            return TimeoutError(
                f"Every host must answer within `start_timeout`={self._options.start_timeout:g} s, but {names} did "
                f"not{f': {errors}' if errors else ''}. All processes were ended."
            )
        running = [result.rank for result in self._results if result.exit is None]
        return TimeoutError(
            f"All processes must return within `timeout`={timeout:g} s, but ranks {running} still ran. "
            "They were ended. Give them more time, or look at what they wait for."
        )

    def _settle(self) -> None:
        """Give other ranks a moment to report their failures."""
        settled = time.monotonic() + _SETTLE_SECONDS
        while (left := settled - time.monotonic()) > 0 and not all(result.exit for result in self._results):
            self._handle(left)

    def _handle(self, seconds: float) -> None:
        for event in self._supervisor.wait(seconds):
            result = self._results[event.rank]
            if event.kind == RESULT:
                result.add(event.data, from_here=event.host in self._local)
            elif event.kind in (STDOUT, STDERR) and self._output is not None:
                self._output.write(event.rank, event.kind, event.data)
            elif event.kind in (ENDED, LOST):
                result.exit = event
                if self._output is not None:
                    self._output.close_rank(event.rank)
            elif event.kind == STARTED and self._output is not None and self._options.verbose:
                self._output.report(f"rank {event.rank} on {event.host} is process {event.facts['pid']}.")
        if self._output is not None:
            self._output.check()
        if self._output is None or self._output.has_room():
            self._supervisor.grant()


def _failures(results: Sequence[_Result]) -> list[_Failure]:
    found = []
    for result in results:
        if result.message is not None and result.message[0] == spawn_child.RAISED:
            found.append(_raised(result.rank, len(results), *result.message[1:]))
        elif result.exit is not None and (result.message is None or result.exit.facts.get("code") != 0):
            found.append(_died(result, len(results), result.exit))
    return found


def _raised(rank: int, size: int, moment: float, content: tuple[bytes | None, str]) -> _Failure:
    pickled, text = content
    if pickled is None:
        line = text.strip().splitlines()[-1]
        error: BaseException = ProcessEndedError(f"Rank {rank} raised {line}", rank, None)
    else:
        error = pickle.loads(pickled)
    return _Failure(moment, rank, error, _RankTraceback(f"Rank {rank} of {size}:\n{text}"))


def _died(result: _Result, size: int, exit: Event) -> _Failure:
    how = exit.facts.get("error")
    code = exit.facts.get("code")
    if exit.kind == LOST:
        how = f"is lost with its host {exit.host}: {how}"
    elif how is not None:
        how = f"could not be started: {how}"
    else:
        when = "before" if result.message is None else "after"
        how = f"{describe_exit(code or 0)} {when} its function returned"
    moment = exit.facts.get("time", time.monotonic()) - _REAPING_SECONDS
    text = f"Rank {result.rank} of {size} {how}; the others were ended. Look at its output."
    return _Failure(moment, result.rank, ProcessEndedError(text, result.rank, code))


def _unpickled(result: _Result) -> Any:
    assert result.message is not None
    return pickle.loads(result.message[2])


# dualdist.spawn: runs a function in several new processes of this machine.
#
# The processes are those of multiprocessing's start method "spawn": they inherit only what is pickled. A supervisor
# starts and ends them as it does for `dualdist run`, so none is left behind, not even when this process is killed.

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


_ELASTIC = (
    "dualdist.run starts a fixed number of processes. Write the function as a script with dualdist.elastic.run, "
    "and start it with torchrun or horovodrun."
)
_MPI = "dualdist.run does not start MPI. Leave it out to use Gloo, or start a script with mpirun."


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
    """Run `func(*args, **kwargs)` in `num_proc` new processes and return the results, in rank order.

    `func` calls `dualdist.init()`, as under every launcher. With cloudpickle installed, it may be a function of a
    notebook, a function of the script (which needs no `__main__` guard) or a lambda; else it must be at the top of a
    module. The parameters up to `max_np` are those of horovod.run (horovod/runner/__init__.py).

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
        The first exception of a rank, with the same type and the rank's traceback as its cause. The others are ended.
        ProcessEndedError: a process died without an exception.
        TimeoutError: after `timeout`, or a host did not answer.
        ConfigurationError: before anything starts, for arguments that are wrong, cannot be pickled or are not supported
            (`use_mpi`, and those of elastic jobs).
    """
    _refuse_elastic(
        min_num_proc=min_num_proc,
        max_num_proc=max_num_proc,
        slots=slots,
        reset_limit=reset_limit,
        cooldown_range=cooldown_range,
        host_discovery_script=host_discovery_script,
        min_np=min_np,
        max_np=max_np,
    )
    with configuration():
        use_gloo, use_mpi = (
            value is not None and flag(name, value)
            for name, value in (("use_gloo", use_gloo), ("use_mpi", use_mpi))
        )
    if use_mpi:
        both = "use_gloo and use_mpi cannot both be set. " if use_gloo else ""
        raise ConfigurationError(f"`use_mpi` must not be set, but is {use_mpi!r} instead: {both}{_MPI}")
    with configuration():
        size = _size(num_proc, np)
        given = items("args", args, "a tuple or list", "Put a single argument into a tuple: (x,).")
        named = mapping("kwargs", {} if kwargs is None else kwargs, fix="Pass names and values.")
        variables = _variables(backend, transport, _interfaces(network_interface, network_interfaces), env)
        options = RunOptions(
            child_command(None if executable is None else str(path("executable", executable))),
            _hosts(hosts, hostfile, size),
            size,
            variables,
            None if output_filename is None else path("output_filename", output_filename),
            interface=variables.get("DUALDIST_INTERFACE"),
            ssh_port=None if ssh_port is None else integer("ssh_port", ssh_port, least=1, below=1 << 16),
            ssh_identity=None
            if ssh_identity_file is None
            else str(path("ssh_identity_file", ssh_identity_file)),
            start_timeout=_seconds(
                "start_timeout", start_timeout, os.environ.get("HOROVOD_START_TIMEOUT") or 30
            ),
            verbose=_level(verbose) > 0,
            task=pickled_task(
                "func", function("func", func, "Pass a function."), given, dict(named), by_value=True
            ),
        )
        limit = None if timeout is None else number("timeout", timeout, above=0, fix="Pass seconds, or None.")
    return results_of_job(options, limit)


def _refuse_elastic(**arguments: Any) -> None:
    for name, value in arguments.items():
        if value is not None:
            raise ConfigurationError(f"`{name}` must be None, but is {value!r} instead: {_ELASTIC}")


def _deprecated(name: str, instead: str) -> None:
    warnings.warn(f"{name} is deprecated, use {instead} instead", DeprecationWarning, stacklevel=4)


def _size(num_proc: Any, np: Any) -> int:
    if np is not None:
        _deprecated("np", "num_proc")
    name, value = ("num_proc", num_proc) if np is None else ("np", np)
    return integer(name, value, least=1, below=1 << 16, fix="Give the number of processes.")


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
    if hostfile is None:
        return [Host("localhost", num_proc)]
    try:
        return parse_hostfile(path("hostfile", hostfile).read_text(), str(hostfile))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"`hostfile` must be a readable file, but is not: {error}.") from error


def _variables(
    backend: str | None,
    transport: str | None,
    interfaces: Sequence[str],
    env: Mapping[str, str] | None,
) -> dict[str, str]:
    if backend is not None:
        load(text("backend", backend))
    check_transport(transport)
    found = backend_variables(backend, transport, option="transport", launcher=DUALDIST_RUN)
    if interfaces:
        found["DUALDIST_INTERFACE"] = ",".join(interfaces)
    fix = "Pass names and values as strings."
    for name, value in mapping("env", {} if env is None else env, fix=fix).items():
        found[text("env", name)] = text(f"env[{name!r}]", value)
    return found


def _seconds(name: str, value: Any, default: Any) -> float:
    seconds = float(default) if value is None else value
    return number(name, seconds, above=0, fix="Pass seconds.")


def _level(verbose: Any) -> int:
    return (
        0
        if verbose is None
        else integer("verbose", int(verbose) if isinstance(verbose, bool) else verbose, least=0)
    )
