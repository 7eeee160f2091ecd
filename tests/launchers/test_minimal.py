"""The first scripts: README.md shows examples/minimal.py; docs/start-one-process.md changes one for one process."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ..helpers.page_blocks import blocks
from ..helpers.script_launch import LAUNCHERS, finish, launch
from ..helpers.world import ROOT

EXAMPLE = "examples/minimal.py"


def test_the_readme_shows_the_example() -> None:
    (block,) = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE)
    assert block == (ROOT / EXAMPLE).read_text()


@pytest.mark.parametrize("launcher", ["python", "torchrun"])
def test_the_example_learns(launcher: str) -> None:
    output = launch(launcher, EXAMPLE).check()
    lines = re.findall(r"^epoch (\d): loss (\S+) on (\d) processes$", output, re.MULTILINE)
    assert [int(epoch) for epoch, _, _ in lines] == [1, 2, 3, 4, 5]
    assert {int(size) for _, _, size in lines} == {LAUNCHERS[launcher].size}
    assert float(lines[-1][1]) < 0.2 < float(lines[0][1])


@pytest.mark.parametrize("launcher", ["python", "torchrun"])
def test_a_script_for_one_process_has_the_losses_of_its_page_in_each_world(launcher: str, tmp_path: Path) -> None:
    _, changed, _, shown = blocks((ROOT / "docs" / "start-one-process.md").read_text())
    (tmp_path / "train.py").write_text(changed.text)
    start = LAUNCHERS[launcher]
    output = finish([*start.command, "train.py"], start.environment, folder=tmp_path).check()
    expected = shown.text.split("\n\n")[start.size - 1]
    assert re.findall(r"^epoch .*$", output, re.MULTILINE) == expected.splitlines()
