"""dualdist install-horovod: runs install_horovod.sh, whose header says what it does, for this environment."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

_SCRIPT = Path(__file__).with_suffix(".sh")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add no options, and show the header of the script as help: it is set by variables."""
    header = _SCRIPT.read_text().partition("\nset ")[0].splitlines()[1:]
    parser.description = "\n".join(line.removeprefix("#").removeprefix(" ") for line in header)


def execute(args: argparse.Namespace) -> int:
    """Build and install Horovod for this interpreter, unless PYTHON names another one. Return the exit code."""
    environment = {"PYTHON": sys.executable, **os.environ}
    return subprocess.run(["bash", str(_SCRIPT)], env=environment, check=False).returncode
