"""What runs on login nodes and before a script imports no torch, which takes seconds and hundreds of megabytes."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from ..helpers.world import ROOT

HIDE_TORCH = "import sys; sys.modules['torch'] = None; from dualdist.cli import main; sys.exit(main(sys.argv[1:]))"


def run_python(source: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `source` in a new interpreter."""
    return subprocess.run(
        [sys.executable, "-c", source, *arguments],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_help_some_modules_and_a_script_that_exports_the_environment_need_no_torch() -> None:
    source = """
import contextlib, os, sys; sys.modules["torch"] = None
import dualdist.core.meeting, dualdist.processes.function
from dualdist.cli import main
from dualdist.exec import export_environment
for words in (["--help"], ["--version"], ["run", "--help"], ["doctor", "--help"]):
    with contextlib.suppress(SystemExit):
        main(words)
export_environment()
print("rank", os.environ["RANK"])
"""
    ended = run_python(source)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("usage: dualdist") == 3 and ended.stdout.endswith("\nrank 0\n")


@pytest.mark.parametrize(
    ("words", "code", "output"),
    [
        ("run -np 2 echo started", 0, r"(\[1,\d\]<stdout>:started\n){2}$"),
        ("exec -- printenv WORLD_SIZE", 0, "1\n$"),
        ("doctor", 1, "Launch\n  launcher         python\n"),
    ],
)
def test_commands_need_no_torch(words: str, code: int, output: str) -> None:
    ended = run_python(HIDE_TORCH, *words.split())
    assert re.match(output, ended.stdout) and ended.returncode == code, ended.stderr
