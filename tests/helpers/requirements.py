"""What a test needs of the machine: without it the test is skipped on a laptop, and fails in CI."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

__all__ = ("need", "need_programs", "need_root", "program")

_FOLDERS = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
"""The path of those who are not root lacks the folders of the servers."""


def need(there: bool, what: str) -> None:
    """Skip the test, with `what` it lacks; with CI=true fail instead, so that nothing is left out in silence there."""
    if not there:
        reason = f"{what} (ci/setup installs what the tests need)"
        if os.environ.get("CI") == "true":
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason)


def need_programs(*names: str) -> None:
    """Need every program in the path."""
    missing = [name for name in names if shutil.which(name, path=_FOLDERS) is None]
    need(not missing, f"needs {', '.join(missing)}")


def need_root() -> None:
    """Need the rights to start servers of the system and to make network namespaces."""
    need(os.geteuid() == 0, "needs root")


def program(name: str) -> str:
    """Return where a program is."""
    found = shutil.which(name, path=_FOLDERS)
    assert found is not None, f"{name} is not installed"
    return str(Path(found))
