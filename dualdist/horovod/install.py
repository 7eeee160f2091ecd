"""dualdist install-horovod: builds Horovod from its source against the torch of this environment, and installs it.

Variables:

  HOROVOD_WITHOUT_MPI=1     leaves the MPI controller out: no MPI is needed
  HOROVOD_GPU_OPERATIONS    NCCL builds for GPUs that this machine lacks
  HOROVOD_CUDA_HOME, HOROVOD_NCCL_HOME   where CUDA's toolkit and NCCL are
  HOROVOD_SOURCE            Horovod's source distribution (tar.gz); without it, pip downloads it
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

_SCRIPT = Path(__file__).with_suffix(".sh")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add no options: it is set by variables."""


def execute(args: argparse.Namespace) -> int:
    """Build and install Horovod for this interpreter. Return the exit code."""
    environment = {**os.environ, "PYTHON": sys.executable}
    return subprocess.run(["bash", str(_SCRIPT)], env=environment, check=False).returncode
