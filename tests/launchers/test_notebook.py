"""examples/notebook.ipynb: its cells run in order, and have no outputs of someone's machine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ..helpers.requirements import need_modules
from ..helpers.script_launch import launch
from ..helpers.world import ROOT

CELLS = json.loads((ROOT / "examples" / "notebook.ipynb").read_text())["cells"]


@pytest.mark.only_ci
def test_the_cells_of_the_notebook_train_on_two_processes_and_on_one(tmp_path: Path) -> None:
    need_modules("cloudpickle")
    script = tmp_path / "notebook.py"
    script.write_text("\n".join("".join(cell["source"]) for cell in CELLS if cell["cell_type"] == "code"))
    output = launch("python", str(script)).check()
    assert "on 2 processes" in output and "on 1 processes" in output


def test_the_notebook_is_stored_without_outputs() -> None:
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in CELLS)
