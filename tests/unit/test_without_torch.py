"""What runs on login nodes and before a script imports no torch, which takes seconds and hundreds of megabytes."""

from __future__ import annotations

import subprocess
import sys

import pytest

from ..helpers.world import ROOT

HIDE_TORCH = (
    "import sys; sys.modules['torch'] = None; from dualdist.cli import main; sys.exit(main(sys.argv[1:]))"
)


def without_torch(source: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `source` where importing torch fails."""
    return subprocess.run(
        [sys.executable, "-c", source, *arguments],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


@pytest.mark.parametrize("arguments", [("--help",), ("--version",), ("run", "--help"), ("doctor", "--help")])
def test_the_command_line_needs_no_torch(arguments: tuple[str, ...]) -> None:
    ended = without_torch(HIDE_TORCH, *arguments)
    assert ended.returncode == 0, ended.stderr


def test_dualdist_run_needs_no_torch() -> None:
    ended = without_torch(HIDE_TORCH, "run", "-np", "2", "echo", "started")
    assert (ended.returncode, ended.stdout.count("started")) == (0, 2), ended.stderr


def test_dualdist_exec_needs_no_torch() -> None:
    ended = without_torch(HIDE_TORCH, "exec", "--", "sh", "-c", "echo $WORLD_SIZE")
    assert (ended.returncode, ended.stdout) == (0, "1\n"), ended.stderr


def test_a_script_can_export_the_environment_itself() -> None:
    source = "from dualdist.launch import export_environment as export; import os; export(); print(os.environ['RANK'])"
    ended = without_torch(f"import sys; sys.modules['torch'] = None; {source}")
    assert (ended.returncode, ended.stdout) == (0, "0\n"), ended.stderr


def test_doctor_shows_the_launch_before_it_needs_torch() -> None:
    ended = without_torch(HIDE_TORCH, "doctor")
    assert ended.stdout.startswith("Launch\n  launcher         python\n"), ended.stderr


@pytest.mark.parametrize("module", ["dualdist.launch", "dualdist.meeting", "dualdist.processes.function"])
def test_a_module_needs_no_torch(module: str) -> None:
    ended = without_torch(f"import sys; sys.modules['torch'] = None; import {module}")
    assert ended.returncode == 0, ended.stderr
