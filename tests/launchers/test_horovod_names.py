"""Every public name of Horovod 0.28.1 exists under dualdist.compat, and its call has the same result as in Horovod."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from ..helpers.requirements import need_modules
from ..helpers.run_command import Run
from ..helpers.script_launch import Script
from ..helpers.world import ROOT

pytestmark = pytest.mark.usefixtures("python")

CALLS = str(ROOT / "tests" / "helpers" / "horovod_calls.py")
NAMES: dict[str, list[str]] = json.loads((ROOT / "tests" / "data" / "horovod_public_names.json").read_text())
"""Module -> its public names, from the installed Horovod 0.28.1."""

DIFFERENT: Mapping[str, str] = {
    "SyncBatchNorm": "works on CPU and GPU",
    "_allreduce_delay": "gradients are complete when `backward()` returns, so the next passes are counted already",
}
"""Name -> how its call differs: a row of the table in docs/horovod.md."""


def results(run: Run, folder: Path, *command: str) -> list[dict[str, Any]]:
    folder.mkdir()
    variables = "OMP_NUM_THREADS=1 HOROVOD_DYNAMIC_PROCESS_SETS=1 HOROVOD_TIMELINE=DYNAMIC PYTHONPATH".split()
    settings = [word for variable in variables for word in ("--env", variable)]
    ended = run("-np", "2", *settings, *command, CALLS, str(folder))
    assert ended.code == 0
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def differs(theirs: Any, ours: Any) -> bool:
    """Return whether a result differs. An exception may have more base classes than Horovod's."""
    if isinstance(theirs, dict) and "raised" in theirs and isinstance(ours, dict) and "raised" in ours:
        return theirs["text"] != ours["text"] or not set(theirs["raised"]) <= set(ours["raised"])
    return bool(theirs != ours)


@pytest.fixture(autouse=True)
def path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def test_every_name_was_called_and_has_the_result_of_horovod(run: Run, tmp_path: Path) -> None:
    python = sys.executable
    ours = results(run, tmp_path / "ours", python, "-m", "dualdist.compat")
    assert {name for names in NAMES.values() for name in names} - ours[0].keys() == set()
    need_modules("horovod.torch")
    theirs = results(run, tmp_path / "theirs", python)
    found = {
        name: (theirs[rank][name], ours[rank][name])
        for rank in range(2)
        for name in theirs[rank]
        if differs(theirs[rank][name], ours[rank][name])
    }
    assert found.keys() == DIFFERENT.keys(), found


def test_every_module_has_its_names(run: Run, script: Script) -> None:
    path = script(
        "import importlib, json\n"
        f"names = json.loads({json.dumps(json.dumps(NAMES))})\n"
        "print([f'{module}.{name}' for module in names for name in names[module]\n"
        "       if not hasattr(importlib.import_module(module), name)])\n"
    )
    ended = run("-np", "1", sys.executable, "-m", "dualdist.compat", path)
    assert ended.written(0) == b"[]\n"


def test_a_name_that_does_not_exist_says_what_to_use(run: Run, script: Script) -> None:
    path = script(
        "import horovod.torch as hvd\n"
        "for work in (lambda: hvd.mpi_ops.nothing, lambda: __import__('horovod.spark.torch')):\n"
        "    try:\n"
        "        work()\n"
        "    except (AttributeError, ImportError) as error:\n"
        "        print(error)\n"
        "try:\n"
        "    hvd.rank()\n"
        "except ValueError as error:\n"
        "    print(error)\n"
        "print(hasattr(hvd, 'nothing'), hasattr(hvd, '__file__'))\n"
    )
    ended = run("-np", "1", sys.executable, "-m", "dualdist.compat", path)
    lines = ended.written(0).decode().splitlines()
    assert "has no 'nothing' under dualdist.compat" in lines[0] and "public function of horovod.torch" in lines[0]
    assert "horovod.spark" in lines[1] and "dualdist.run" in lines[1]
    assert lines[2:] == ["Horovod has not been initialized; use hvd.init().", "False True"]
