"""The command `dualdist`. Each subcommand is a module with `add_arguments(parser)` and `execute(args)`.

Only the module of the given subcommand is imported, and torch only by those that need it.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import TextIO

from . import __version__
from .errors import ConfigurationError

_COMMANDS = {
    "doctor": ("dualdist.doctor.command", "show what was detected, and which backends and transports can start here"),
    "exec": ("dualdist.exec.command", "under any launcher: become a torch script, with all variables of torchrun"),
    "hang": (
        "dualdist.observation.hang",
        "say which rank the others wait for, from the files that ranks write when a call fails or stalls",
    ),
    "install-horovod": ("dualdist.horovod.install", "build Horovod 0.28.1 for this environment's torch and install it"),
    "migrate": (
        "dualdist.migrate.command",
        "say what a script of Horovod, DDP or mpi4py needs to run with dualdist, and change it",
    ),
    "parity": ("dualdist.parity.command", "run a training script in two ways, and say where and why they first differ"),
    "report": (
        "dualdist.observation.report",
        "show how the ranks of a run spent their time, and for which rank the others waited",
    ),
    "run": ("dualdist.processes.command", "start a command in several processes, on one or more hosts"),
}
"""Subcommand -> its module, and what it does."""
_PIPE_CODE = 141
"""The exit code by which a shell reports SIGPIPE: the reader of the output has closed it."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv`, by default this process's own, and return its exit code."""
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:  # it is closed, and the next file that is opened would get its number
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w"))
    names = "\n".join(f"  {name:15} {purpose}" for name, (_, purpose) in _COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="dualdist",
        description=f"Data-parallel training under Horovod's API.\n\ncommands:\n{names}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("-v", "--version", action="version", version=__version__)
    parser.add_argument("command", choices=_COMMANDS, metavar="COMMAND")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="those of the command; see COMMAND --help")
    words = list(sys.argv[1:] if argv is None else argv)
    if not words:
        parser.print_help(sys.stderr)
        return 2
    try:
        try:
            given = parser.parse_args(words[:1])  # of the others, argparse would drop a "--"
            module, command = _load(given.command)
            return int(module.execute(command.parse_args(words[1:])))
        finally:
            _drop_lost(sys.stderr)
            sys.stdout.flush()
    except ConfigurationError as error:
        reason = str(error)
    except OSError as error:
        _drop_lost(sys.stdout)
        if isinstance(error, BrokenPipeError):
            return _PIPE_CODE
        reason = str(error)
    with contextlib.suppress(OSError):
        sys.stderr.write(f"dualdist {words[0]}: {reason}\n")
    _drop_lost(sys.stderr)
    return 2


def _drop_lost(stream: TextIO) -> None:
    """Drop what cannot be written. Python would try again at its end, and exit with 120."""
    try:
        stream.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _load(name: str) -> tuple[ModuleType, argparse.ArgumentParser]:
    module = importlib.import_module(_COMMANDS[name][0])
    parser = argparse.ArgumentParser(
        prog=f"dualdist {name}",
        description=module.__doc__,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    module.add_arguments(parser)
    return module, parser
