"""Start COMMAND in several processes, as horovodrun does, without Horovod:

    dualdist run -np 4 python train.py
    dualdist run -H node1:4,node2:4 python train.py

Each process finds its rank in the environment, where dualdist.init() reads it. Other hosts are reached by ssh without a
password, and need the same Python, scripts and data at the same paths. When a process fails, all others are ended, and
its exit code becomes the exit code of this command.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..backends import DEFAULT_BACKEND, DISTRIBUTED_BACKENDS, TRANSPORTS
from ..errors import ConfigurationError
from ..launch import DUALDIST_RUN
from ..processes.allocation import find_allocation
from ..processes.hosts import Host, parse_hostfile, parse_hosts
from ..processes.preparation import RunOptions
from ..processes.run import run_job
from ..processes.starters import DEFAULT_STARTER, STARTERS
from ..processes.variables import backend_variables
from .horovodrun import add_horovodrun_options, refuse, variables_of
from .version import version

__all__ = ("add_arguments", "execute")

_PIPE_CODE = 141
"""The exit code by which a shell reports SIGPIPE."""

_OPTIONS: tuple[tuple[tuple[str, ...], dict[str, Any]], ...] = (
    (("-v", "--version"), {"action": "version", "version": version()}),
    (
        ("-np", "--num-proc"),
        {
            "dest": "size",
            "type": int,
            "metavar": "N",
            "help": "the number of processes; by default all slots of the hosts",
        },
    ),
    (
        ("--backend",),
        {"choices": DISTRIBUTED_BACKENDS, "help": "the backend (DUALDIST_BACKEND)"},
    ),
    (
        ("--transport",),
        {"choices": TRANSPORTS, "help": "what transfers the backend's data (DUALDIST_TRANSPORT)"},
    ),
    (("--gloo",), {"action": "store_const", "const": "gloo", "help": "the same as --transport gloo"}),
    (
        ("--output", "--output-filename"),
        {"type": Path, "metavar": "DIR", "help": "also write the output to DIR/rank.N/stdout and stderr"},
    ),
    (
        ("-prefix-timestamp", "--prefix-output-with-timestamp"),
        {"dest": "timestamps", "action": "store_true", "help": "write the time before each line"},
    ),
    (
        ("--env",),
        {
            "action": "append",
            "default": [],
            "metavar": "NAME[=VALUE]",
            "help": "set this variable in all processes; without VALUE, to its value in this shell; may be repeated",
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
    (
        ("--start-with",),
        {
            "choices": STARTERS,
            "default": DEFAULT_STARTER,
            "help": "what reaches the other hosts (ssh); the others need no ssh between the hosts of a job",
        },
    ),
    (("-p", "--ssh-port"), {"type": int, "metavar": "PORT", "help": "the port of ssh on the other hosts"}),
    (("-i", "--ssh-identity-file"), {"metavar": "FILE", "help": "the private key for ssh"}),
    (
        ("--start-timeout",),
        {
            "metavar": "SECONDS",
            "help": "how long to wait for each host to answer (30, or HOROVOD_START_TIMEOUT)",
        },
    ),
    (("--disable-cache",), {"action": "store_true", "help": "no effect: nothing is ever cached"}),
    (("--verbose",), {"action": "store_true", "help": "report what is started and chosen"}),
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
        help="the hosts, which are filled in this order; by default those of the job (Slurm, PBS, LSF, Grid Engine, "
        "Cobalt, Flux), else this host",
    )
    where.add_argument(
        "-hostfile", "--hostfile", metavar="FILE", help="a file with one `host slots=N` per line"
    )
    add_horovodrun_options(parser)
    parser.add_argument(
        "command", nargs=argparse.REMAINDER, metavar="COMMAND ...", help="the command that every process runs"
    )


def execute(args: argparse.Namespace) -> int:
    """Run the job that `args` describes; return its exit code. Raises ConfigurationError when it cannot start."""
    refuse(args.refused)
    options = _options(args, os.environ)
    try:
        return run_job(options, os.environ)
    except BrokenPipeError:
        # The reader of the output has closed it.
        return _PIPE_CODE


def _options(args: argparse.Namespace, env: Mapping[str, str]) -> RunOptions:
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not command:
        raise ConfigurationError(
            "COMMAND must be given, but is absent. Write it last: dualdist run -np 2 python train.py"
        )
    return RunOptions(
        command,
        _hosts(args, env),
        args.size,
        _variables(args, env),
        args.output,
        args.timestamps,
        ",".join(args.interfaces) if args.interfaces else None,
        args.ssh_port,
        args.ssh_identity_file,
        args.start_with,
        _start_timeout(args, env),
        args.verbose,
    )


def _hosts(args: argparse.Namespace, env: Mapping[str, str]) -> list[Host]:
    if args.hosts is not None:
        return parse_hosts(args.hosts)
    if args.hostfile is not None:
        try:
            return parse_hostfile(Path(args.hostfile).read_text(), args.hostfile)
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigurationError(f"`--hostfile` must be a readable file, but is not: {error}.") from error
    allocation = find_allocation(env)
    if allocation is not None and not (len(allocation.hosts) == 1 and args.size):
        listed = ",".join(f"{host.name}:{host.slots}" for host in allocation.hosts)
        sys.stderr.write(f"dualdist run: the hosts are {listed}, from {allocation.variable}.\n")
        return allocation.hosts
    if args.size is None:
        raise ConfigurationError(
            "`-np` must be given without -H and --hostfile, but is absent. Give the number of processes."
        )
    return [Host("localhost", args.size)]


def _variables(args: argparse.Namespace, env: Mapping[str, str]) -> dict[str, str]:
    transport = args.transport
    if args.gloo:
        if transport not in (None, args.gloo):
            raise ConfigurationError(
                f"`--gloo` and `--transport {transport}` cannot be given together. Leave one out."
            )
        transport = args.gloo
    chosen = backend_variables(args.backend, transport, option="--transport", launcher=DUALDIST_RUN)
    backend = args.backend or env.get("DUALDIST_BACKEND") or DEFAULT_BACKEND
    found, ignored = variables_of(args, backend)
    for option in ignored:
        sys.stderr.write(
            f"dualdist run: {option} has no effect on the backend {backend}: it is a setting of Horovod.\n"
        )
    found |= chosen
    if args.interfaces:
        found["DUALDIST_INTERFACE"] = ",".join(args.interfaces)
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
