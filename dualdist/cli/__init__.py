"""The command `dualdist`. Each subcommand is a module with `add_arguments(parser)` and `execute(args)`."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import sys
from collections.abc import Sequence

from ..errors import ConfigurationError

# The version of dualdist.


def version() -> str:
    """Return the version of the installed package, 'not installed' for a source tree."""
    try:
        return importlib.metadata.version("dualdist")
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


_COMMANDS = {
    "bench": "measure dualdist beside torch, Horovod and others",
    "doctor": "show what was detected, and which backends and transports can start here",
    "run": "start a command in several processes, on one or more hosts",
}
"""name of the subcommand and of its module -> what it does."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv`, by default this process's own, and return its exit code."""
    parser = argparse.ArgumentParser(
        prog="dualdist", description="Data-parallel training under Horovod's API."
    )
    parser.add_argument("-v", "--version", action="version", version=version())
    commands = parser.add_subparsers(dest="subcommand", required=True, metavar="COMMAND")
    for name, purpose in _COMMANDS.items():
        module = importlib.import_module(f".{name}", __name__)
        command = commands.add_parser(
            name,
            help=purpose,
            description=module.__doc__,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(command)
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        # The error shows the usage of the subcommand.
        commands.choices[args.subcommand].error(f"unrecognized arguments: {' '.join(unknown)}")
    try:
        return int(importlib.import_module(f".{args.subcommand}", __name__).execute(args))
    except ConfigurationError as error:
        sys.stderr.write(f"dualdist {args.subcommand}: {error}\n")
        return 2
