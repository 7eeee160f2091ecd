"""Measure dualdist beside torch's DDP, Horovod and others, with the scripts of benchmarks/ in a checkout.

dualdist bench                    list the benchmarks
dualdist bench step --help        the options of one
dualdist bench step --models mlp small --json step.json --plot step.png
"""

from __future__ import annotations

import argparse
import ast
import os
import sys
from pathlib import Path

from ..errors import ConfigurationError

_ROOT = Path(__file__).parents[2]
_NAMES = ("step", "collectives", "memory", "startup", "checkpoint", "sharded_checkpoint", "gpu")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `dualdist bench`."""
    parser.add_argument("name", nargs="?", choices=_NAMES, help="the benchmark")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its options")


def execute(args: argparse.Namespace) -> int:
    """List the benchmarks and return 0, or replace this process by one: signals reach the benchmark directly.

    Raises ConfigurationError outside a checkout.
    """
    folder = _ROOT / "benchmarks"
    if not folder.is_dir():
        raise ConfigurationError(
            f"The benchmarks are not installed with dualdist: there is no {folder}. Run `python -m dualdist bench` in "
            "a checkout of the repository."
        )
    if args.name is None:
        for name in _NAMES:
            purpose = (ast.get_docstring(ast.parse((folder / f"{name}.py").read_text())) or "").partition(
                "\n"
            )[0]
            sys.stdout.write(f"  {name:20} {purpose}\n")
        return 0
    path = os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH"))))
    command = [sys.executable, str(folder / f"{args.name}.py"), *args.arguments]
    os.execve(sys.executable, command, os.environ | {"PYTHONPATH": path})
