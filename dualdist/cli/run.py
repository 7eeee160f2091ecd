"""Start COMMAND in several processes, as horovodrun does, without Horovod:

    dualdist run -np 4 python train.py
    dualdist run -H node1:4,node2:4 python train.py

Each process finds its rank in the environment; dualdist.init() reads it. Other hosts are reached by ssh, without a
password, and need the same python, scripts and data at the same paths. The first process that fails ends all others,
and its exit code is that of the command.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..backends import BACKENDS, TRANSPORTS
from ..errors import ConfigurationError
from ..processes.hosts import Host, parse_hostfile, parse_hosts
from ..processes.job import RunOptions, run_job
from .horovodrun import add_horovodrun_options, refuse, variables_of
from .version import version

__all__ = ("add_arguments", "execute")

_PIPE_CODE = 141  # as a shell tells of SIGPIPE


_OPTIONS: tuple[tuple[tuple[str, ...], dict[str, Any]], ...] = (
    (("-v", "--version"), {"action": "version", "version": version()}),
    (
        ("-np", "--num-proc"),
        {
            "dest": "size",
            "type": int,
            "metavar": "N",
            "help": "number of processes; by default all slots of the hosts",
        },
    ),
    (
        ("--backend",),
        {"choices": [name for name in BACKENDS if name != "local"], "help": "the backend (DUALDIST_BACKEND)"},
    ),
    (
        ("--transport",),
        {"choices": TRANSPORTS, "help": "what the backend talks through (DUALDIST_TRANSPORT)"},
    ),
    (("--gloo",), {"action": "store_true", "help": "the same as --transport gloo"}),
    (
        ("--output", "--output-filename"),
        {"type": Path, "metavar": "DIR", "help": "write DIR/rank.N/stdout and stderr too"},
    ),
    (
        ("-prefix-timestamp", "--prefix-output-with-timestamp"),
        {"dest": "timestamps", "action": "store_true", "help": "put the time before each line"},
    ),
    (
        ("--env",),
        {
            "action": "append",
            "default": [],
            "metavar": "NAME[=VALUE]",
            "help": "send this variable also where it would stay here, or set it; may be repeated",
        },
    ),
    (
        ("--network-interface", "--network-interfaces"),
        {
            "dest": "interfaces",
            "action": "append",
            "metavar": "IF",
            "help": "the network interface to use (DUALDIST_INTERFACE); may be repeated",
        },
    ),
    (("-p", "--ssh-port"), {"type": int, "metavar": "PORT", "help": "ssh's port on the other hosts"}),
    (("-i", "--ssh-identity-file"), {"metavar": "FILE", "help": "ssh's private key"}),
    (
        ("--start-timeout",),
        {"metavar": "SECONDS", "help": "for every host to answer (30, or HOROVOD_START_TIMEOUT)"},
    ),
    (("--disable-cache",), {"action": "store_true", "help": "nothing is cached in any case"}),
    (("--verbose",), {"action": "store_true", "help": "tell what is started, and what is chosen"}),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `dualdist run`."""
    parser.usage = "dualdist run -np N [-H HOST:SLOTS,... | --hostfile FILE] [OPTIONS] COMMAND ..."
    for flags, how in _OPTIONS:
        parser.add_argument(*flags, **how)
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "-H",
        "--hosts",
        metavar="HOST:SLOTS,...",
        help="the hosts, the first filled first; by default this one",
    )
    where.add_argument("-hostfile", "--hostfile", metavar="FILE", help="the hosts, one `host slots=N` a line")
    add_horovodrun_options(parser)
    parser.add_argument(
        "command", nargs=argparse.REMAINDER, metavar="COMMAND ...", help="what every process runs"
    )


def execute(args: argparse.Namespace) -> int:
    """Run the job that `args` describe; return its exit code. Raises ConfigurationError for what cannot be done."""
    refuse(args.refused)
    options = _options(args, os.environ)
    try:
        return run_job(options, os.environ)
    except BrokenPipeError:  # nobody reads on; nor is there anyone for the interpreter's last flush
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _PIPE_CODE


def _options(args: argparse.Namespace, env: Mapping[str, str]) -> RunOptions:
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not command:
        raise ConfigurationError(
            "COMMAND must be given, but is absent. Write it last: dualdist run -np 2 python train.py"
        )
    return RunOptions(
        command,
        _hosts(args),
        args.size,
        _variables(args, env),
        args.output,
        args.timestamps,
        ",".join(args.interfaces) if args.interfaces else None,
        args.ssh_port,
        args.ssh_identity_file,
        _start_timeout(args, env),
        args.verbose,
    )


def _hosts(args: argparse.Namespace) -> list[Host]:
    if args.hosts is not None:
        return parse_hosts(args.hosts)
    if args.hostfile is not None:
        try:
            return parse_hostfile(Path(args.hostfile).read_text(), args.hostfile)
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigurationError(
                f"`--hostfile` must be a file that can be read, but: {error}."
            ) from error
    if args.size is None:
        raise ConfigurationError(
            "`-np` must be given without -H and --hostfile, but is absent. Give the number of processes."
        )
    return [Host("localhost", args.size)]


def _variables(args: argparse.Namespace, env: Mapping[str, str]) -> dict[str, str]:
    transport = args.transport
    if args.gloo:
        if transport not in (None, "gloo"):
            raise ConfigurationError(
                f"`--gloo` and `--transport {transport}` cannot be given together. Leave one out."
            )
        transport = "gloo"
    if transport == "mpi":
        raise ConfigurationError(
            "`--transport` must be nccl or gloo, but is mpi instead. Start with mpirun, which starts MPI."
        )
    backend = args.backend or env.get("DUALDIST_BACKEND") or "torch"
    found, idle = variables_of(args, backend)
    for option in idle:
        sys.stderr.write(
            f"dualdist run: {option} has no effect: it is for --backend horovod, but this is {backend}.\n"
        )
    chosen = {"DUALDIST_BACKEND": args.backend, "DUALDIST_TRANSPORT": transport}
    chosen["DUALDIST_INTERFACE"] = ",".join(args.interfaces) if args.interfaces else None
    found |= {name: value for name, value in chosen.items() if value is not None}
    for item in args.env:
        name, given, value = item.partition("=")
        if not name or (not given and name not in env):
            raise ConfigurationError(
                f"`--env` must be NAME=VALUE or the NAME of a variable, but is {item!r} instead."
            )
        found[name] = value if given else env[name]
    return found


def _start_timeout(args: argparse.Namespace, env: Mapping[str, str]) -> float:
    given = args.start_timeout
    source = "--start-timeout"
    if given is None:
        source, given = "HOROVOD_START_TIMEOUT", env.get("HOROVOD_START_TIMEOUT") or 30
    try:
        seconds = float(given)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= 86400:
        raise ConfigurationError(
            f"`{source}` must be a number of seconds above 0, a day at most, but is {given!r} instead."
        )
    return seconds
