"""The loop on the first page: README.md shows examples/minimal.py, which trains with and without a launcher."""

from __future__ import annotations

import re

import pytest

from ..helpers.script_launch import LAUNCHERS, launch
from ..helpers.world import ROOT

EXAMPLE = "examples/minimal.py"


def test_the_readme_shows_the_example() -> None:
    (block,) = re.findall(
        r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE
    )
    assert block == (ROOT / EXAMPLE).read_text()


@pytest.mark.parametrize("launcher", ["python", "torchrun"])
def test_the_example_learns(launcher: str) -> None:
    output = launch(launcher, EXAMPLE).check()
    lines = re.findall(r"^epoch (\d): loss (\S+) on (\d) processes$", output, re.MULTILINE)
    assert [int(epoch) for epoch, _, _ in lines] == [1, 2, 3, 4, 5]
    assert {int(size) for _, _, size in lines} == {LAUNCHERS[launcher].size}
    assert float(lines[-1][1]) < 0.2 < float(lines[0][1])
