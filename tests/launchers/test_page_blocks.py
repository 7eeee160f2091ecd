"""The code in docs/ and README.md: blocks in Python run in a world of one, and command lines are those that exist.

test_minimal.py runs the block of README.md.
"""

from __future__ import annotations

import itertools
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dualdist import cli

from ..helpers import page_blocks
from ..helpers.forks import forked
from ..helpers.page_blocks import blocks
from ..helpers.world import ROOT

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/*.md"))]
IN_PYTHON = {
    page: [block for block in blocks(page.read_text()) if block.language == "python"]
    for page in PAGES
    if page.parent != ROOT
}
RUN = [page for page, found in IN_PYTHON.items() if any(block.runs for block in found)]
SHELL = ("sh", "bash", "console")


def test_all_blocks_in_python_compile() -> None:
    for page, found in IN_PYTHON.items():
        for block in found:
            compile("\n" * block.line + block.text, str(page), "exec")


@pytest.mark.parametrize("page", RUN, ids=lambda page: page.name)
def test_blocks_in_python_run_in_a_world_of_one(page: Path, tmp_path: Path) -> None:
    ended = subprocess.run(
        forked([sys.executable, page_blocks.__file__, str(page)]),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr


def command_lines(page: str) -> Iterator[tuple[str, bool]]:
    """Yield each command line of the blocks for a shell, and each `dualdist ...` of the text, which may be a part."""
    shell = "\n".join(block.text for block in blocks(page) if block.language in SHELL)
    for line in shell.replace("\\\n", "").splitlines():
        yield line, False
    text = re.sub(r"^ *```.*?^ *```$", "", page, flags=re.DOTALL | re.MULTILINE)
    for code in re.findall(r"(?<!`)`([^`]+)`(?!`)", text):
        if re.search(rf"\bdualdist\s+({'|'.join(cli._COMMANDS)})\b", code):
            yield " ".join(code.split()), True


def commands(line: str) -> Iterator[list[str]]:
    """Yield the arguments of each `dualdist` in a command line."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars="();<>|&")
    lexer.whitespace_split = True
    words = list(lexer)
    for place, word in enumerate(words):
        if word == "dualdist" and words[place + 1 :]:
            yield list(itertools.takewhile(lambda one: one[0] not in "();<>|&", words[place + 1 :]))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_command_lines_of_dualdist_are_accepted(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for line, is_part in command_lines(page.read_text()):
        for name, *arguments in commands(line):
            try:
                cli._load(name)[1].parse_args(arguments)
            except SystemExit as ended:
                errors = capsys.readouterr().err
                is_placeholder = re.search(r"value: '[A-Z]+'$", errors, re.MULTILINE)  # `-p PORT`
                is_cut = is_part and ("arguments are required" in errors or is_placeholder)
                assert ended.code == 0 or is_cut, f"{line}\n{errors}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_scripts_and_folders_that_are_named_exist(page: Path) -> None:
    named = set(re.findall(r"(?<![\w/.])(?:benchmarks|ci|docs|examples)/[\w/.-]*\w", page.read_text()))
    assert {path for path in named if not (ROOT / path).exists()} == set()
