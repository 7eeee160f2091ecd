"""The command `dualdist`, and its subcommands: one module each, with `add_arguments(parser)` and `execute(args)`."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from ..errors import ConfigurationError
from .version import version

__all__ = ("main",)

_COMMANDS = {
    "doctor": "tell what was detected, and which backends and transports can start here",
    "run": "start a command in several processes, on this host or on several",
}
"""name, which is also that of its module -> what it does."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv`, by default that of this process, and return its exit code."""
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
    if unknown:  # told with the usage of the subcommand
        commands.choices[args.subcommand].error(f"unrecognized arguments: {' '.join(unknown)}")
    try:
        return int(importlib.import_module(f".{args.subcommand}", __name__).execute(args))
    except ConfigurationError as error:
        sys.stderr.write(f"dualdist {args.subcommand}: {error}\n")
        return 2
