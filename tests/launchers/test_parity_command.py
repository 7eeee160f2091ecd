"""`dualdist parity`: real trainings in two ways, with one planted fault or none."""

from __future__ import annotations

import functools
import json
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from dualdist.cli import main

from ..helpers import parity_script
from ..helpers.at_once import started_at_once
from ..helpers.forks import BIN, forked, use_forks
from ..helpers.parity_script import FAULTY_STEP
from ..helpers.process_watch import Watched
from ..helpers.requirements import need_modules
from ..helpers.script_launch import Ended, finish
from ..helpers.world import ROOT

SCRIPT = parity_script.__file__
TORCHRUN = "torch+gloo@torchrun"


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch, python: str) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PATH", str(BIN), prepend=os.pathsep)
    monkeypatch.chdir(ROOT)


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Returns the record of a training of a style without a fault, under torchrun."""

    @functools.cache
    def made(style: str) -> Path:
        file = tmp_path_factory.mktemp("record") / f"{style}.json"
        assert main(["parity", "--left", TORCHRUN, "--record", str(file), SCRIPT, style]) == 0
        return file

    return made


def compared(folder: Path, *arguments: str | Path) -> Any:
    """Return the result of `dualdist parity ARGUMENTS`, whose exit code must fit."""
    file = folder / "result.json"
    code = main(["parity", "--json", str(file), *map(str, arguments)])
    result = json.loads(file.read_text())
    assert code == int(not result["equal"])
    return result


@pytest.mark.only_ci(where=lambda fault: fault not in ("lr", "params"))
@pytest.mark.parametrize(
    ("fault", "step", "rank", "stage", "kind"),
    [
        ("lr", 0, 0, "settings of the optimizer", "settings"),
        ("sync-bn", 0, 0, "output of the model", "layer"),
        ("activation", 0, 0, "output of the model", "class: The layer act is ReLU()"),
        ("eval", 0, 0, "output of the model", "layer: The layer norm is BatchNorm1d"),
        ("eval-activation", 0, 0, "output of the model", "layer: The layer norm is BatchNorm1d"),
        ("unused-abs", 0, 0, "output of the model", "unknown"),
        ("sampler", 0, 0, "batch", "data-order"),
        ("set-epoch", 3, 0, "batch", "set-epoch"),
        ("accumulation", 0, 0, "loss", "scale"),
        ("dropout", FAULTY_STEP, 0, "output of the model", "random-numbers: This may hide a second cause"),
        ("params", -1, 1, "initial weights", "no-broadcast"),
        ("buffers", -1, 1, "initial buffers", "no-broadcast-of-buffers"),
        ("overflow", FAULTY_STEP, 1, "loss", "operations"),
        ("no-reduction", 0, 0, "reduced gradient", "reduction"),
    ],
)
def test_a_fault_is_found_where_it_begins_and_named(
    fault: str, step: int, rank: int, stage: str, kind: str, record: Callable[[str], Path], tmp_path: Path
) -> None:
    cell = f"{TORCHRUN},FAULT={fault}"
    result = compared(tmp_path, "--against", record("dualdist"), "--right", cell, SCRIPT, "dualdist")
    first = result["first"]
    assert (first["step"], first["rank"], first["stage"]) == (step, rank, stage)
    kind, _, words = kind.partition(": ")
    assert result["cause"]["kind"] == kind and words in result["cause"]["text"]
    # A second change is not left out.
    assert any("layer act" in note for note in result["notes"]) == (fault == "eval-activation")


@pytest.mark.only_ci
def test_the_step_that_horovod_hides_in_a_broadcast_is_named(tmp_path: Path) -> None:
    need_modules("horovod")
    cells = [f"{cell},FAULT=optimizer-state" for cell in (TORCHRUN, "horovod+gloo@horovodrun")]
    result = compared(tmp_path, "--left", cells[0], "--right", cells[1], SCRIPT, "horovod")
    assert (result["first"]["step"], result["cause"]["kind"]) == (-1, "early-step")
    assert "On the right" in result["cause"]["text"]


@pytest.mark.only_ci
def test_buffers_that_ddp_does_not_broadcast_are_named(record: Callable[[str], Path], tmp_path: Path) -> None:
    cell = f"{TORCHRUN},FAULT=ddp-buffers"
    result = compared(tmp_path, "--against", record("torch"), "--right", cell, SCRIPT, "torch")
    first = result["first"]
    # torch broadcasts before the first forward, when all are equal, and after a backward that reduces.
    assert (first["step"], first["rank"], first["stage"]) == (1, 1, "buffers after the step")
    assert result["cause"]["kind"] == "no-broadcast-of-buffers"
    assert "On the right" in result["cause"]["text"]


@pytest.mark.only_ci
@pytest.mark.parametrize("fault", ["threads", "order"])
def test_rounding_is_no_difference_and_has_no_cause(fault: str, record: Callable[[str], Path], tmp_path: Path) -> None:
    cell = f"{TORCHRUN},FAULT={fault}"
    result = compared(tmp_path, "--against", record("dualdist"), "--right", cell, SCRIPT, "dualdist")
    assert result["equal"] and result["cause"] is None
    assert 0 < result["largest"] < 1e-4
    assert any("threads 1 and right 2" in note for note in result["notes"]) == (fault == "threads")


@pytest.mark.only_ci(where=lambda style: style != "horovod")
@pytest.mark.parametrize(
    ("style", "cell", "modules"),
    [
        ("dualdist", "horovod+mpi@mpirun", ("horovod", "mpi4py")),
        ("dualdist", "torch+mpi@mpirun", ("mpi4py",)),
        ("dualdist-ddp", "horovod+gloo@horovodrun", ("horovod",)),
        ("horovod", "horovod+gloo@horovodrun", ("horovod",)),
        ("torch", "torch+gloo@run", ()),
        ("torch", "torch+gloo@exec", ("mpi4py",)),
    ],
)
def test_the_same_script_is_equal_bit_for_bit(
    style: str, cell: str, modules: tuple[str, ...], record: Callable[[str], Path], tmp_path: Path
) -> None:
    need_modules(*modules)
    result = compared(tmp_path, "--against", record(style), "--right", cell, SCRIPT, style)
    assert (result["equal"], result["least"], result["notes"]) == (True, None, [])
    assert len(result["losses"]) == parity_script.EPOCHS * 3


@pytest.mark.only_ci
@pytest.mark.parametrize("cell", [TORCHRUN, "horovod+gloo@horovodrun", "torch+mpi@mpirun"])
def test_three_ranks_with_a_grad_scaler_skip_the_same_step_and_are_equal(cell: str, tmp_path: Path) -> None:
    need_modules(*(module for word, module in {"+mpi": "mpi4py", "horovod": "horovod"}.items() if word in cell))
    cells = ("--left", f"{TORCHRUN},FAULT=overflow", "--right", f"{cell},FAULT=overflow")
    result = compared(tmp_path, "-np", "3", *cells, SCRIPT, "scaled")
    text = "On both sides, losses or gradients are infinite or NaN"
    assert (result["equal"], result["notes"]) == (True, [f"{text} (first in step {FAULTY_STEP})."])
    assert len(result["losses"]) == parity_script.EPOCHS * 3 - 1


@pytest.mark.only_ci
def test_other_collectives_of_the_script_are_named(record: Callable[[str], Path], tmp_path: Path) -> None:
    for style, function in (("dualdist", "allreduce"), ("horovod", "allreduce"), ("torch", "all_reduce")):
        cell = f"{TORCHRUN},FAULT=collective"
        result = compared(tmp_path, "--against", record(style), "--right", cell, SCRIPT, style)
        assert result["equal"]
        (note,) = result["notes"]
        assert note.startswith(
            f"The script's collectives differ first in step {FAULTY_STEP}, rank 0, call 0: {function}("
        )
        assert (
            "float32[1]" in note.partition(" on the left, ")[0] and "float32[2]" in note.partition(" on the left, ")[2]
        )


@pytest.mark.only_ci(where=lambda style: style != "horovod")
@pytest.mark.parametrize("style", ["dualdist", "dualdist-ddp", "horovod", "torch"])
def test_the_reduced_gradient_is_the_mean_of_what_the_ranks_recorded_as_their_own(
    style: str, record: Callable[[str], Path]
) -> None:
    ranks = json.loads(record(style).read_text())["ranks"]
    entries = [entry for rank in ranks for entry in rank["values"] if entry[0] == 0]
    own = [values for _, stage, _, values in entries if stage == "own gradient"]
    reduced = [values for _, stage, _, values in entries if stage == "reduced gradient"]
    assert (len(own), len(reduced)) == (len(ranks) * parity_script.PASSES, len(ranks))
    for name, applied in reduced[0].items():
        sketches = zip(*(values[name][2] for values in own), strict=True)
        assert applied[2] == pytest.approx([sum(parts) / len(ranks) for parts in sketches], rel=1e-4, abs=1e-7)
        assert own[0][name][0] != own[parity_script.PASSES][name][0]  # of the first pass of two ranks


@pytest.mark.only_ci
def test_one_process_with_the_whole_batch_is_equal(tmp_path: Path) -> None:
    cells = ("--left", TORCHRUN, "--right", "torch+gloo x1")
    result = compared(tmp_path, *cells, "--steps", "4", SCRIPT, "whole")
    assert result["equal"] and 0 < result["largest"] < 1e-4
    assert "2 and 1 processes" in result["notes"][0]
    assert len(result["losses"]) == 4


@pytest.mark.only_ci
def test_what_cannot_run_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "script.py"
    script.write_text("import torch\nraise RuntimeError('this script fails')")
    assert main(["parity", "--left", "torch+gloo x1", str(script)]) == 2
    assert "RuntimeError: this script fails" in capsys.readouterr().err
    script.write_text("import torch")
    assert main(["parity", "--left", "torch+gloo x1", str(script)]) == 2
    assert "no step of an optimizer" in capsys.readouterr().err
    assert main(["parity", "--against", str(script), SCRIPT]) == 2
    assert "--record has written" in capsys.readouterr().err
    assert main(["parity", str(tmp_path / "absent.py")]) == 2
    assert "SCRIPT must be a file" in capsys.readouterr().err
    (tmp_path / "horovod.py").write_text("raise ImportError('this Horovod fails')")
    assert main(["parity", "--left", f"horovod+gloo@torchrun x1,PYTHONPATH={tmp_path}", str(script)]) == 2
    assert "ImportError: this Horovod fails" in capsys.readouterr().err


HANGS = """\
import os, threading
import dualdist as hvd
hvd.init()
open(f"process-{os.getpid()}", "w")
open("arrived", "w").write(".")

def load_batch():
    threading.Event().wait()

if hvd.rank() == 1:
    load_batch()
hvd.barrier()
"""
WHEN_BOTH_HANG = """\
import os, select, subprocess, sys
from dualdist.cli import main
from dualdist.processes import hosts

os.mkfifo("arrived")
arrived = os.open("arrived", os.O_RDWR)

def wait_from_then(process, timeout=None, wait=subprocess.Popen.wait):
    ended = os.pidfd_open(process.pid) if timeout is not None else None
    for _ in range(2 if timeout is not None else 0):
        if arrived in select.select([arrived, ended], [], [])[0]:
            os.read(arrived, 1)
    return wait(process, timeout)

subprocess.Popen.wait = wait_from_then
sys.executable = sys.argv.pop(1)
sys.exit(main(sys.argv[1:]))
"""
"""The command `dualdist`, whose timeout begins when both ranks have written to the pipe."""
TIMEOUT = 2


@pytest.fixture(scope="module")
def of_hanging_cells(request: pytest.FixtureRequest) -> Iterator[Mapping[str, Future[tuple[Path, Ended]]]]:
    """The folder and the result of `dualdist parity`, by cell."""
    use_forks(True)  # also with --all: they take less time than new interpreters

    def ended(hanging: str, folder: Path) -> tuple[Path, Ended]:
        (folder / "script.py").write_text(HANGS)
        (folder / "horovodrun").write_text(f'#!/bin/sh\nexec {shlex.join(forked([f"{BIN}/horovodrun"]))} "$@"\n')
        (folder / "horovodrun").chmod(0o755)
        path = {"PATH": os.pathsep.join([str(folder), str(BIN), os.environ["PATH"]])}
        command = (sys.executable, "-c", WHEN_BOTH_HANG, sys.executable, "parity", "--left", hanging)
        return folder, finish((*command, "--timeout", str(TIMEOUT), f"{folder}/script.py"), path, folder=folder)

    with started_at_once(request, "hanging", ended, 4) as futures:
        yield futures


@pytest.mark.only_ci
@pytest.mark.parametrize("hanging", [TORCHRUN, "horovod+gloo@horovodrun", "torch+mpi@mpirun", "torch+gloo@run"])
def test_a_cell_that_hangs_is_ended_and_the_line_of_each_rank_shown(
    hanging: str, of_hanging_cells: Mapping[str, Future[tuple[Path, Ended]]]
) -> None:
    need_modules(*(module for word, module in {"+mpi": "mpi4py", "horovod": "horovod"}.items() if word in hanging))
    folder, ended = of_hanging_cells[hanging].result()
    assert ended.code == 2, ended.output
    assert ended.output.splitlines()[1:] == [
        f"dualdist parity: {hanging} must end within {TIMEOUT} s (--timeout), but did not:",
        f"  rank 0: in <module> at {folder}/script.py:12: hvd.barrier()",
        f"  rank 1: in load_batch at {folder}/script.py:8: threading.Event().wait()",
    ]
    processes = [int(file.name.partition("-")[2]) for file in folder.glob("process-*")]
    assert len(processes) == 2 and Watched(processes).left() == []


def test_a_picture_needs_matplotlib(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["parity", "--plot", str(tmp_path / "picture.png"), SCRIPT]) == 2
    assert "pip install matplotlib" in capsys.readouterr().err


@pytest.mark.only_ci
def test_the_picture_has_both_losses(record: Callable[[str], Path], tmp_path: Path) -> None:
    need_modules("matplotlib")
    picture = tmp_path / "picture.png"
    cells = ("--against", record("torch"), "--right", TORCHRUN)
    compared(tmp_path, *cells, "--plot", picture, "--steps", "2", SCRIPT, "torch")
    assert picture.read_bytes().startswith(b"\x89PNG")
