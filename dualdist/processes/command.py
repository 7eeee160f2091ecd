"""Start COMMAND in several processes, as horovodrun does, without Horovod:

    dualdist run -np 4 python train.py
    dualdist run -H node1:4,node2:4 python train.py

Each process finds its rank in the environment, where dualdist.init() reads it. Other hosts are reached by ssh without a
password, and need the same Python, scripts and data at the same paths. When a process fails, all others are ended, and
its exit code becomes the exit code of this command.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from .. import __version__
from ..core.backends import DEFAULT_BACKEND, DISTRIBUTED_BACKENDS, HOROVOD_BACKENDS, TRANSPORTS
from ..core.checks import wrong
from ..core.launch import DUALDIST_RUN, detect
from ..core.types import NEVER_SECONDS
from ..errors import ConfigurationError
from .agent import ENDED, ENDING_SIGNALS, LOST, PASSED_SIGNALS, grace_of
from .hosts import DEFAULT_STARTER, STARTERS, Host, backend_variables, find_allocation, parse_hosts, read_hostfile
from .job import Event, Job, RunOptions, describe_exit, read_start_timeout, started

# horovodrun's options and their effect here: a table, so that no option is silently ignored.
#
# The names are from horovod/runner/launch.py:parse_args, the variables from
# horovod/runner/common/util/config_parser.py:set_env_from_args.

_NEVER = str(NEVER_SECONDS)
"""A year in seconds, for limits that Horovod can switch off."""


class Tuning(NamedTuple):
    """An option that sets variables. `value` converts its argument; None for an option without an argument."""

    flags: tuple[str, ...]
    variables: Mapping[str, str]
    """name -> value, in which {} is replaced by the converted argument."""
    value: Callable[[str], object] | None = None
    backends: tuple[str, ...] = DISTRIBUTED_BACKENDS
    """The backends on which it has an effect. With another one, `dualdist run` warns."""


def whole_number(text: str) -> int:
    """Return the number that `text` writes in the digits 0 to 9. Raises ValueError."""
    if not text.isascii():
        raise ValueError
    return int(text)


def _number(kind: Callable[[str], float], least: float, most: float = math.inf) -> Callable[[str], float]:
    """Return a function that converts a text to a number in the range. Raises ValueError."""

    def converted(text: str) -> float:
        number = kind(text)
        if not least <= number <= most:
            raise ValueError
        return number

    return converted


_count, _positive = _number(whole_number, 0), _number(whole_number, 1)
_time, _noise = _number(float, 0), _number(float, 0, 1)
_LEVELS = ("TRACE", "DEBUG", "INFO", "WARNING", "ERROR", "FATAL")


def _only_horovod(
    flag: str, variable: str, value: Callable[[str], object] | None = None, *more: str, to: str = "1"
) -> Tuning:
    return Tuning((flag, *more), {variable: to if value is None else "{}"}, value, HOROVOD_BACKENDS)


TUNING = (
    _only_horovod("--fusion-threshold-mb", "HOROVOD_FUSION_THRESHOLD", lambda text: _count(text) * 2**20),
    _only_horovod("--cycle-time-ms", "HOROVOD_CYCLE_TIME", _time),
    _only_horovod("--cache-capacity", "HOROVOD_CACHE_CAPACITY", _count),
    _only_horovod("--hierarchical-allreduce", "HOROVOD_HIERARCHICAL_ALLREDUCE"),
    _only_horovod("--no-hierarchical-allreduce", "HOROVOD_HIERARCHICAL_ALLREDUCE", to="0"),
    _only_horovod("--hierarchical-allgather", "HOROVOD_HIERARCHICAL_ALLGATHER"),
    _only_horovod("--no-hierarchical-allgather", "HOROVOD_HIERARCHICAL_ALLGATHER", to="0"),
    _only_horovod("--torus-allreduce", "HOROVOD_TORUS_ALLREDUCE"),
    _only_horovod("--no-torus-allreduce", "HOROVOD_TORUS_ALLREDUCE", to="0"),
    _only_horovod("--autotune", "HOROVOD_AUTOTUNE"),
    _only_horovod("--no-autotune", "HOROVOD_AUTOTUNE", to="0"),
    _only_horovod("--autotune-log-file", "HOROVOD_AUTOTUNE_LOG", str),
    _only_horovod("--autotune-warmup-samples", "HOROVOD_AUTOTUNE_WARMUP_SAMPLES", _count),
    _only_horovod("--autotune-steps-per-sample", "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE", _positive),
    _only_horovod("--autotune-bayes-opt-max-samples", "HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES", _count),
    _only_horovod("--autotune-gaussian-process-noise", "HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE", _noise),
    _only_horovod("--num-nccl-streams", "HOROVOD_NUM_NCCL_STREAMS", _count),
    _only_horovod("--thread-affinity", "HOROVOD_THREAD_AFFINITY", _count),
    _only_horovod("--gloo-timeout-seconds", "HOROVOD_GLOO_TIMEOUT_SECONDS", _count),
    _only_horovod("--log-level", "HOROVOD_LOG_LEVEL", lambda text: _LEVELS[_LEVELS.index(text)]),
    _only_horovod("--log-with-timestamp", "HOROVOD_LOG_HIDE_TIME", None, "--no-log-hide-timestamp", to="0"),
    _only_horovod("--log-without-timestamp", "HOROVOD_LOG_HIDE_TIME", None, "--log-hide-timestamp"),
    Tuning(("--timeline-filename",), {"HOROVOD_TIMELINE": "{}"}, str),
    Tuning(("--timeline-mark-cycles",), {"HOROVOD_TIMELINE_MARK_CYCLES": "1"}),
    Tuning(("--no-timeline-mark-cycles",), {"HOROVOD_TIMELINE_MARK_CYCLES": "0"}),
    Tuning(
        ("--no-stall-check",),
        {
            "DUALDIST_STALL_WARN_SECONDS": _NEVER,
            "DUALDIST_STALL_TIMEOUT_SECONDS": _NEVER,
            "HOROVOD_STALL_CHECK_DISABLE": "1",
        },
    ),
    Tuning(("--stall-check",), {"HOROVOD_STALL_CHECK_DISABLE": "0"}),
    Tuning(
        ("--stall-check-warning-time-seconds",),
        {"DUALDIST_STALL_WARN_SECONDS": "{}", "HOROVOD_STALL_CHECK_TIME_SECONDS": "{}"},
        _positive,
    ),
    Tuning(
        ("--stall-check-shutdown-time-seconds",),
        {"DUALDIST_STALL_TIMEOUT_SECONDS": "{}"},
        lambda text: _count(text) or _NEVER,
    ),
    Tuning(("--tcp",), {"NCCL_IB_DISABLE": "1"}),
)

_MPI = "`dualdist run` does not start MPI. Use mpirun, which dualdist supports, or leave the option out."
_ELASTIC = "`dualdist run` starts a fixed number of processes. Use torchrun or horovodrun for elastic jobs."

_OF_MPI = "--mpi --mpi-args --binding-args --mpi-threads-disable --no-mpi-threads-disable"
_OF_ELASTIC = (
    "--min-np --min-num-proc --max-np --max-num-proc --host-discovery-script --elastic-timeout --reset-limit "
    "--blacklist-cooldown-range"
)
REFUSED = {
    **dict.fromkeys(_OF_MPI.split(), _MPI),
    "--jsrun": "`dualdist run` does not start jsrun. Use jsrun itself, or leave the option out.",
    **dict.fromkeys(_OF_ELASTIC.split(), _ELASTIC),
    "--slots-per-host": f"{_ELASTIC} Give the slots of a fixed job as -H host:SLOTS.",
    "--config-file": "`dualdist run` reads no configuration file. Write its settings as options.",
    **dict.fromkeys(("-cb", "--check-build"), "Use `dualdist doctor`, which shows what can run here."),
}
"""An option that is not supported -> what to do instead."""


class _Refuse(argparse.Action):
    """An option that is not supported: giving it raises ConfigurationError."""

    def __call__(self, parser: Any, args: Any, values: Any, option: str | None = None) -> None:
        raise ConfigurationError(f"`{option}` is not supported: {self.help}")


def _add_horovodrun_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("horovodrun's settings, which become environment variables").add_argument
    for row in TUNING:
        shown = " and ".join(f"{name}={value.format('VALUE')}" for name, value in row.variables.items())
        shown += f"; only with --backend {' or '.join(row.backends)}" * (row.backends == HOROVOD_BACKENDS)
        how: Any = {"action": "store_true"} if row.value is None else {"metavar": "VALUE"}
        add(*row.flags, dest=row.flags[0], help=f"sets {shown}", **how)
    add = parser.add_argument_group("horovodrun's options that are refused").add_argument
    for flag, remedy in REFUSED.items():
        add(flag, dest="refused", action=_Refuse, nargs="?", help=remedy)


def variables_of(args: argparse.Namespace, backend: str) -> tuple[dict[str, str], list[str]]:
    """Return the variables that the options of TUNING set, and the options without an effect on `backend`.

    Raises ConfigurationError for a value out of range and for two options that contradict each other.
    """
    found: dict[str, str] = {}
    set_by: dict[str, str] = {}
    ignored = []
    for row in TUNING:
        given = getattr(args, row.flags[0])
        if given in (None, False):
            continue
        if backend not in row.backends:
            ignored.append(row.flags[0])
            continue
        try:
            value = row.value and row.value(given)
        except ValueError:
            raise ConfigurationError(f"`{row.flags[0]}` cannot be {given!r}. See `dualdist run --help`.") from None
        for name, text in row.variables.items():
            setting = text.format(value)
            if found.setdefault(name, setting) != setting:
                raise ConfigurationError(
                    f"`{row.flags[0]}` and `{set_by[name]}` cannot be given together. Leave one out."
                )
            set_by[name] = row.flags[0]
    return found, ignored


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `dualdist run`."""
    parser.usage = "dualdist run -np N [-H HOST:SLOTS,... | --hostfile FILE] [OPTIONS] COMMAND ..."
    add = parser.add_argument
    add("-v", "--version", action="version", version=__version__)
    text = "the number of processes; by default all slots of the hosts"
    add("-np", "--num-proc", dest="size", type=whole_number, metavar="N", help=text)
    add("--backend", choices=DISTRIBUTED_BACKENDS, help="the backend (DUALDIST_BACKEND)")
    add("--transport", choices=TRANSPORTS, help="what transfers the backend's data (DUALDIST_TRANSPORT)")
    add("--gloo", action="store_const", const="gloo", help="the same as --transport gloo")
    text = "also write the output to DIR/rank.N/stdout and stderr"
    add("--output", "--output-filename", type=Path, metavar="DIR", help=text)
    flags = ("-prefix-timestamp", "--prefix-output-with-timestamp")
    add(*flags, dest="timestamps", action="store_true", help="write the time before each line")
    text = "set this variable in all processes; without VALUE, to its value in this shell; may be repeated"
    add("--env", action="append", default=[], metavar="NAME[=VALUE]", help=text)
    text = "the network interface to use (DUALDIST_INTERFACE); may be repeated"
    flags = ("--network-interface", "--network-interfaces")
    add(*flags, dest="interfaces", action="append", default=[], metavar="IF", help=text)
    text = "what reaches the other hosts (ssh); the others need no ssh between the hosts of a job"
    add("--start-with", choices=STARTERS, default=DEFAULT_STARTER, help=text)
    add("-p", "--ssh-port", type=whole_number, metavar="PORT", help="the port of ssh on the other hosts")
    add("-i", "--ssh-identity-file", metavar="FILE", help="the private key for ssh")
    text = "how long to wait for each host to answer (30, or HOROVOD_START_TIMEOUT)"
    add("--start-timeout", metavar="SECONDS", help=text)
    add("--disable-cache", action="store_true", help="no effect: nothing is ever cached")
    add("--verbose", action="store_true", help="report what is started and chosen")
    where = parser.add_mutually_exclusive_group()
    text = (
        "the hosts, which are filled in this order; by default those of the job (Slurm, PBS, LSF, Grid Engine, Cobalt, "
        "Flux), else this host"
    )
    where.add_argument("-H", "--hosts", metavar="HOST:SLOTS,...", help=text)
    where.add_argument("-hostfile", "--hostfile", metavar="FILE", help="a file with one `host slots=N` per line")
    _add_horovodrun_options(parser)
    add("command", nargs=argparse.REMAINDER, metavar="COMMAND ...", help="the command that every process runs")


def execute(args: argparse.Namespace) -> int:
    """Run the job that `args` describes; return its exit code. Raises ConfigurationError when it cannot start."""
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not command:
        raise ConfigurationError(
            "COMMAND must be given, but is absent. Write it last: dualdist run -np 2 python train.py"
        )
    options = RunOptions(
        command,
        _hosts(args, os.environ),
        args.size,
        _variables(args, os.environ),
        args.output,
        args.timestamps,
        args.ssh_port,
        args.ssh_identity_file,
        args.start_with,
        read_start_timeout(args.start_timeout, os.environ),
        args.verbose,
        has_input=True,
    )
    _warn_of_several_jobs(os.environ)
    try:
        with _signals() as signals, started(options, os.environ) as job:
            return _Ending(job, signals, options.start_timeout).follow()
    except BrokenPipeError:
        raise  # the exit code is that of SIGPIPE
    except OSError as error:
        with contextlib.suppress(OSError):
            sys.stderr.write(f"dualdist run: {error}; all processes have ended.\n")
        return 1


def _warn_of_several_jobs(env: Mapping[str, str]) -> None:
    """Warn, in the first of several tasks, that each of them starts a world of its own."""
    # Wrong variables do no harm: the processes do not inherit them.
    with contextlib.suppress(ConfigurationError):
        launch = detect(env)
        if launch.rank == 0 and launch.size > 1:
            sys.stderr.write(
                f"dualdist run: {launch.launcher} started {launch.size} tasks ({launch.sources['size']}), and each "
                "copy of `dualdist run` in them has a world of its own: they train separately, and write to the same "
                "files. Start `dualdist run ...` without srun or mpirun, or leave `dualdist run` out (`srun python "
                "train.py`).\n"
            )


def _hosts(args: argparse.Namespace, env: Mapping[str, str]) -> list[Host]:
    if args.hosts is not None:
        return parse_hosts(args.hosts)
    if args.hostfile is not None:
        return read_hostfile(Path(args.hostfile), "--hostfile")
    variable, hosts = find_allocation(env)
    if len(hosts) > 1 or (hosts and not args.size):
        listed = ",".join(f"{host.name}:{host.slots}" for host in hosts)
        sys.stderr.write(f"dualdist run: the hosts are {listed}, from {variable}.\n")
        return hosts
    if args.size is None:
        raise ConfigurationError(
            "`-np` must be given without -H and --hostfile, but is absent. Give the number of processes."
        )
    return [Host("localhost", args.size)]


def _variables(args: argparse.Namespace, env: Mapping[str, str]) -> dict[str, str]:
    transport = args.transport or args.gloo
    if args.gloo and transport != args.gloo:
        raise ConfigurationError(f"`--gloo` and `--transport {transport}` cannot be given together. Leave one out.")
    chosen = backend_variables(args.backend, transport, args.interfaces, option="--transport", launcher=DUALDIST_RUN)
    backend = args.backend or env.get("DUALDIST_BACKEND") or DEFAULT_BACKEND
    found, ignored = variables_of(args, backend)
    for option in ignored:
        sys.stderr.write(
            f"dualdist run: {option} has no effect on the backend {backend}: it is a setting of Horovod.\n"
        )
    found |= chosen
    for item in args.env:
        name, given, value = item.partition("=")
        if not name or (not given and name not in env):
            raise wrong("--env", "NAME=VALUE or the NAME of a variable", item, error=ConfigurationError)
        found[name] = value if given else env[name]
    return found


# How a job ends: when a process fails, all others are ended, and its exit code is that of the job. A signal to the
# launcher is passed on to all processes. A second Ctrl-C kills them; schedulers may repeat other signals. All this
# works even while nobody reads the output.

_SIGNALS = (*ENDING_SIGNALS, *PASSED_SIGNALS)
_OUTPUT_SECONDS, _LAST_OUTPUT_SECONDS = 4.0, 1.0
"""How long the launcher waits for its output to be read after the first signal, and after a later one."""


class _Ending:
    """Follows a job until its processes have ended, and finds its exit code."""

    def __init__(self, job: Job, signals: int, start_timeout: float) -> None:
        """signals: a file with the numbers of the signals that arrive."""
        self._job = job
        self._signals = signals
        self._start_timeout = start_timeout
        self._code: int | None = None
        """The exit code of the job, None until something ends it."""
        self._signalled = False
        """Whether it is that of a signal to the launcher. A process may still set another one."""
        self._patience = math.inf
        """Until when to wait for the output to be read, on the clock time.monotonic()."""
        job.watch(signals, self._take_signals)

    def follow(self) -> int:
        """Wait until all processes have ended and their output is written; return the exit code."""
        job = self._job
        while job.running and (left := job.time_left()) > 0:
            for event in job.wait(time.monotonic() + left):
                self._handle(event)
            silent = job.silent_hosts(f"{self._start_timeout:g} s (see --start-timeout)")
            if silent is not None:
                self._fail(1, silent)
        # After a signal, wait only for a short time until the output is read.
        job.output.end_lines()
        self._patience = max(self._patience, time.monotonic() + _LAST_OUTPUT_SECONDS)
        while job.output.unwritten() and time.monotonic() < self._patience:
            job.wait(self._patience)
        return self._code or 0

    def _handle(self, event: Event) -> None:
        if event.kind == LOST:
            self._fail(255, f"{event.host}, with rank {event.rank}, is lost: {event.facts['error']}")
        elif event.kind == ENDED:
            who, code, error = f"rank {event.rank} on {event.host}", event.facts["code"], event.facts["error"]
            if error is not None:
                self._fail(code, f"{who} could not be started: {error}")
            elif self._signalled and code > 1:
                # It has saved its state, perhaps. 1 is the code of an exception, as when another one has ended sooner.
                self._code, self._signalled = code, False
            elif code != 0:
                self._fail(code if code > 0 else 128 - code, f"{who} {describe_exit(code)}")

    def _fail(self, code: int, reason: str) -> None:
        """End the job with exit code `code`, unless it is already ending."""
        if self._code is not None:
            return
        self._code = code
        self._job.output.report(f"{reason}{'; ending the others' if self._job.running else ''}.")
        self._job.end(signal.SIGTERM)

    def _take_signals(self) -> bool:
        # Other signals have numbers here, too, if somebody handles them.
        for number in filter(_SIGNALS.__contains__, os.read(self._signals, 64)):
            name = signal.Signals(number).name
            if number in PASSED_SIGNALS:
                self._job.output.report(f"received {name}; passed it on to all processes.")
                self._job.send(b"signal %d\n" % number)
                continue
            first = math.isinf(self._patience)
            self._patience = time.monotonic() + (_OUTPUT_SECONDS if first else _LAST_OUTPUT_SECONDS)
            if self._code is None:
                self._code, self._signalled = 128 + number, True
                self._job.output.report(f"received {name}; ending all processes.")
                self._job.end(number, grace_of(number))
            elif number == signal.SIGINT:
                self._job.send(b"kill\n")
        return True


@contextlib.contextmanager
def _signals() -> Iterator[int]:
    """Yield a file with the numbers of the signals that arrive. Signals that are ignored, as under nohup, stay so."""
    with contextlib.ExitStack() as undo:
        reader, writer = os.pipe()
        for end in (reader, writer):
            undo.callback(os.close, end)
            os.set_blocking(end, False)
        undo.callback(signal.set_wakeup_fd, signal.set_wakeup_fd(writer, warn_on_full_buffer=False))
        for number in _SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:
                undo.callback(signal.signal, number, signal.signal(number, lambda *_: None))
        yield reader
