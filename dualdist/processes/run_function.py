"""dualdist.run: runs a function in new processes on one host or several, as horovod.run does.

The processes are started as by `dualdist run`, and are ended with this call. Elastic jobs need a launcher.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from ..backends import check_transport, load
from ..checks import configuration, flag, function, integer, items, mapping, number, path, text
from ..errors import ConfigurationError
from ..launch import DUALDIST_RUN
from .function_task import child_command, pickled_task
from .hosts import Host, parse_hostfile, parse_hosts
from .preparation import RunOptions
from .spawn_results import results_of_job
from .variables import backend_variables

__all__ = ("run",)

T = TypeVar("T")

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
