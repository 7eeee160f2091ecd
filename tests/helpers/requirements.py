"""What a test needs of the machine. Without it, the test is skipped with the reason; in CI it fails."""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path

import pytest

_FOLDERS = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
"""PATH and the folders of servers, which PATH has for root alone."""


def need(there: bool, what: str) -> None:
    """Skip the test if something is not there. With CI=true it fails instead, so that CI tests everything."""
    if not there:
        reason = f"{what} (ci/setup installs what the tests need)"
        if os.environ.get("CI") == "true":
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason)


def need_programs(*names: str) -> None:
    """Need every program in the path."""
    missing = [name for name in names if shutil.which(name, path=_FOLDERS) is None]
    need(not missing, f"needs {', '.join(missing)}")


def need_modules(*names: str) -> None:
    """Need every Python module, and the program that comes with it: mpi4py without mpirun has no MPI."""
    missing = [name for name in names if not _is_there(name)]
    need(not missing, f"needs {', '.join(missing)}")
    if "mpi4py" in names:
        need_programs("mpirun")


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # a part of a package that is not there
        return False


def need_root() -> None:
    """Need the rights to start servers of the system and to make network namespaces."""
    need(os.geteuid() == 0, "needs root")


def program(name: str) -> str:
    """Return where a program is."""
    found = shutil.which(name, path=_FOLDERS)
    assert found is not None, f"{name} is not installed"
    return str(Path(found))
