"""The code in docs/ and README.md: blocks in Python run in a world of one, and command lines are run where possible.

test_minimal.py runs the block of README.md.
"""

from __future__ import annotations

import itertools
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from dualdist import cli

from ..helpers import page_blocks
from ..helpers.forks import BIN, DUALDIST, forked
from ..helpers.page_blocks import Block, blocks
from ..helpers.requirements import need_modules, need_programs
from ..helpers.script_launch import finish
from ..helpers.world import ROOT

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/*.md"))]
IN_PYTHON = {
    page: [block for block in blocks(page.read_text()) if block.language == "python"]
    for page in PAGES
    if page.parent != ROOT
}
RUN = [page for page, found in IN_PYTHON.items() if any(block.runs for block in found)]
SHELL = ("sh", "bash", "console")
STARTS = r"(?:\w+=\S+ )*(?:python|torchrun|horovodrun|mpirun|mpiexec|srun|sbatch|dualdist (?:exec|run -np \d+ python)) "
"""How command lines begin that the tests run."""
PRESENT = ("", "Horovod", "Slurm")
"""What the tests have of what command lines need."""
FIRST_PAGE = ROOT / "docs" / "start.md"
HELLO = blocks(FIRST_PAGE.read_text())[0].text
"""A script that prints rank and size. It takes the place of each script that a command line names."""


def test_all_blocks_in_python_compile() -> None:
    for page, found in IN_PYTHON.items():
        for block in found:
            compile("\n" * block.line + block.text, str(page), "exec")


@pytest.mark.parametrize("page", RUN, ids=lambda page: page.name)
def test_blocks_in_python_run_as_they_stand_in_an_empty_file(page: Path, tmp_path: Path) -> None:
    finish([sys.executable, page_blocks.__file__, str(page)], folder=tmp_path).check()


@dataclass(frozen=True)
class Line:
    """A command line of a page, without its comment."""

    text: str
    needs: str = ""
    """What running it needs: `needs ...` in its comment, or in the one before its block."""
    is_part: bool = False
    """Whether it is in the text of the page and may be a part of a line."""


def shell_lines(block: Block) -> Iterator[Line]:
    """Yield the command lines of a block for a shell; of others none."""
    for line in block.text.replace("\\\n", "").splitlines() if block.language in SHELL else ():
        text, _, comment = re.split(r"(^|\s+)#|$", line, maxsplit=1)
        needs = re.search(r"\bneeds (.+)", comment)
        if text:
            yield Line(text, needs[1] if needs else block.needs)


def command_lines(page: str) -> Iterator[Line]:
    """Yield the lines of blocks for a shell, the first column of tables, and each `dualdist ...` of the text."""
    for block in blocks(page):
        yield from shell_lines(block)
    text = re.sub(r"^ *```.*?^ *```$", "", page, flags=re.DOTALL | re.MULTILINE)
    yield from map(Line, re.findall(rf"^\| `({STARTS}[^`]*\.py)`", text, re.MULTILINE))
    for code in re.findall(r"(?<!`)`([^`]+)`(?!`)", text):
        if re.search(rf"\bdualdist\s+({'|'.join(cli._COMMANDS)})\b", code):
            yield Line(" ".join(code.split()), is_part=True)


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
    for line in command_lines(page.read_text()):
        for name, *arguments in commands(line.text):
            try:
                cli._load(name)[1].parse_args(arguments)
            except SystemExit as ended:
                errors = capsys.readouterr().err
                is_placeholder = re.search(r"value: '[A-Z]+'$", errors, re.MULTILINE)  # `-p PORT`
                is_cut = line.is_part and ("arguments are required" in errors or is_placeholder)
                assert ended.code == 0 or is_cut, f"{line.text}\n{errors}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_scripts_and_folders_that_are_named_exist(page: Path) -> None:
    named = set(re.findall(r"(?<![\w/.])(?:benchmarks|ci|docs|examples)/[\w/.-]*\w", page.read_text()))
    assert {path for path in named if not (ROOT / path).exists()} == set()


def account(line: Line) -> str | None:
    """Return how a command line is accounted for: run, parsed, or marked with what it needs. None: not at all."""
    if line.needs not in PRESENT:
        return "marked"
    if re.match(rf"{STARTS}|export |ip ", line.text):
        return "run"
    return "parsed" if re.match(r"(\w+=\S+ )*dualdist ", line.text) else None


def accounts(how: str) -> dict[str, str]:
    """Return the command lines that are accounted for in a way: the first of each shape, by its shape."""
    found: dict[str, str] = {}
    for page in (FIRST_PAGE, *PAGES):
        for line in command_lines(page.read_text()):
            if not line.is_part and account(line) == how:
                shape = re.sub(r"[\w/]+\.py\b.*", "train.py", " ".join(line.text.split()))
                found.setdefault(re.sub(r"\d+", "N", shape), line.text)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_each_command_line_is_run_or_parsed_or_says_what_it_needs(page: Path) -> None:
    lines = command_lines(page.read_text())
    assert [line.text for line in lines if not line.is_part and account(line) is None] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_readers_see_what_a_block_for_a_shell_needs(page: Path) -> None:
    for block in blocks(page.read_text()):
        if block.language in SHELL:
            seen = " ".join(f"{block.introduction} {block.text}".lower().split())
            assert re.sub("^an? ", "", block.needs.lower()) in seen, f"line {block.line} needs {block.needs}"
            subprocess.run(["bash", "-n"], input=block.text, text=True, timeout=20, check=True)


VARIABLES = {
    "PYTHONPATH": str(ROOT),
    "PET_STANDALONE": "1",  # torchrun's --standalone: a free port
    "SBATCH_WAIT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "OMPI_MCA_hwloc_base_binding_policy": "none",
    "OMPI_MCA_btl": "tcp,self",
    "OMPI_MCA_btl_tcp_if_include": "lo",
}
"""What takes the place of options that a command line needs here, as root and with fewer cores than processes."""


def prepare(folder: Path, text: str) -> str:
    """Write what a command line uses into `folder`; return a PATH with programs that start forks (helpers/forks.py)."""
    for script in [*re.findall(r"[\w/]+\.py\b", text), "package/train.py", "train.py"]:
        (folder / script).parent.mkdir(parents=True, exist_ok=True)
        (folder / script).write_text(HELLO)
    programs = {
        "torchrun": forked([f"{BIN}/torchrun"]),
        "horovodrun": forked([f"{BIN}/horovodrun"]),
        "dualdist": forked(DUALDIST),
        "any": ["python", "train.py"],
        "job.sbatch": ["srun", "python", "train.py"],
    }
    for name, command in programs.items():
        (folder / name).write_text(f'#!/bin/sh\n#SBATCH --ntasks=2\nexec {shlex.join(command)} "$@"\n')
        (folder / name).chmod(0o755)
    return f"{folder}:{Path(forked([sys.executable])[0]).parent}:{BIN}:{os.environ['PATH']}"


def size_of(text: str) -> int:
    """Return the number of processes that a command line starts."""
    numbers = {name: int(number) for name, number in re.findall(r"(-[\w-]+)[ =](\d+)\b", text)}
    for name in ("-np", "-n", "--ntasks", "--nproc-per-node"):
        if name in numbers:
            return numbers[name]
    if "--ntasks-per-node" in numbers:
        return numbers["--nodes"] * numbers["--ntasks-per-node"]
    return 2 if re.match("srun|sbatch", text) else 1


def outputs(page: str) -> dict[str, str]:
    """Return what a page shows below each command line that is run: one part of a block for each line of a block."""
    found: dict[str, str] = {}
    for command, output in itertools.pairwise(blocks(page)):
        lines = [line for line in shell_lines(command) if account(line) == "run"]
        if lines and output.language == "text":
            found |= {line.text: part for line, part in zip(lines, output.text.split("\n\n"), strict=True)}
    return found


OUTPUTS = outputs(FIRST_PAGE.read_text())


@pytest.mark.only_all(where=lambda text: re.search("SUMMARY|job.s|--kill|torchrun.*(compat|restart)", text))
@pytest.mark.parametrize("text", accounts("run").values(), ids=accounts("run"))
def test_a_command_line_runs(text: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    words = set(re.findall(r"[\w.-]+", text))
    need_modules(*["horovod"] * ("horovodrun" in words), *["horovod", "mpi4py"] * ("mpirun" in words))
    need_programs(*{"mpiexec", "ip", "openssl"} & words)
    variables = {**VARIABLES, "PATH": prepare(tmp_path, text)}
    if words & {"srun", "sbatch"}:
        variables |= request.getfixturevalue("slurm").environment | {"SLURM_NTASKS": str(size_of(text))}
    ended = finish(["bash", "-euc", text], variables, folder=tmp_path)
    output = ended.output + "".join(path.read_text() for path in tmp_path.glob("*.out"))
    assert ended.code == 0
    if "export" in words:
        assert output == ""
    elif not words & {"ip", "doctor"}:
        size = size_of(text)
        ranks = re.findall(r"rank (\d+) of (\d+)", output)
        assert sorted(ranks) == [(str(rank), str(size)) for rank in range(size)]
        if text in OUTPUTS:
            lines = r"rank \d+ of \d+: [\w ]+, \w+ over \w+"
            assert sorted(re.findall(lines, output)) == sorted(re.findall(lines, OUTPUTS[text]))


def test_torchrun_and_horovodrun_accept_lines_that_are_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.run import get_args_parser

    need_modules("horovod")
    from horovod.runner.launch import parse_args

    parsers: dict[str, Callable[[list[str]], object]] = {
        "torchrun": get_args_parser().parse_args,
        "horovodrun": lambda _: parse_args(),
    }
    parsed = set()
    for text in accounts("marked").values():
        name, *words = text.split()
        if name in parsers:
            monkeypatch.setattr(sys, "argv", [name, *words])
            parsers[name](words)
            parsed.add(name)
    assert parsed == parsers.keys()
