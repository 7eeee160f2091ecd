"""The scripts of benchmarks/ with real contestants, each for one round."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ..helpers.requirements import need_root
from ..helpers.world import ROOT

SECONDS = 280.0

Report = dict[str, Any]


def bench_json(folder: Path, name: str, contestants: tuple[str, ...], *arguments: str) -> Report:
    """Return what a benchmark writes with --json."""
    chosen = ["--rounds", "1", "--json", str(folder / "report.json"), "--contestants", *contestants]
    ended = subprocess.run(
        [sys.executable, f"benchmarks/{name}.py", *chosen, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    report: Report = json.loads((folder / "report.json").read_text())
    assert not report["left_out"]
    assert list(report["rounds"]) == list(contestants)
    return report


@contextlib.contextmanager
def started_bench(arguments: tuple[str, ...], **variables: str) -> Iterator[subprocess.Popen[str]]:
    """Start benchmarks/step.py with the model `small`; end it when the block ends."""
    with subprocess.Popen(
        [sys.executable, "benchmarks/step.py", "--models", "small", *arguments],
        cwd=ROOT,
        env=os.environ | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.terminate()


def check_ratios(report: Report, figures: list[str]) -> None:
    rounds, ratios = report["rounds"], report["ratios"]
    assert set(ratios) == set(rounds) - {report["baseline"]}
    (theirs,) = rounds[report["baseline"]]
    for name, found in ratios.items():
        (ours,) = rounds[name]
        expected = {figure: ours[figure] / theirs[figure] for figure in figures}
        assert {figure: row["median"] for figure, row in found.items()} == pytest.approx(expected)
        assert all(row["least"] == row["median"] == row["greatest"] for row in found.values())


@pytest.mark.only_all
def test_step_compares_trainers_in_processes_of_their_own(tmp_path: Path) -> None:
    chart = tmp_path / "chart.png"
    report = bench_json(
        tmp_path, "step", ("DDP", "dualdist torch+gloo module"), "--models", "small", "--plot", str(chart)
    )
    check_ratios(report, ["small ms", "small CPU ms"])
    assert report["versions"]["torch"] and report["machine"]["cpus"]
    assert chart.read_bytes().startswith(b"\x89PNG")


@pytest.mark.only_all
@pytest.mark.parametrize("interruption", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_interrupted_bench_keeps_the_rounds_before(tmp_path: Path, interruption: signal.Signals) -> None:
    file, single = tmp_path / "report.json", "single process"
    arguments = ("--rounds", "50", "--contestants", single, "--baseline", single, "--json", str(file))
    with started_bench(arguments) as process:
        assert process.stderr is not None
        assert process.stderr.readline().startswith("round 1 of 50: single process: ")
        saved = json.loads(file.read_text())["rounds"][single]
        process.send_signal(interruption)
        table, errors = process.communicate(timeout=60)
    report = json.loads(file.read_text())
    rounds = report["rounds"][single]
    assert saved and rounds[: len(saved)] == saved
    assert report["missing_rounds"] == 50 - len(rounds)
    assert process.returncode == 1
    assert f"{50 - len(rounds)} of 50 rounds are not complete." in errors
    assert table.startswith("small ms, 2 processes\n  single process ")


@pytest.mark.only_all
def test_contestant_that_fails_is_left_out(tmp_path: Path) -> None:
    file, single, ours = tmp_path / "report.json", "single process", "dualdist torch+gloo module"
    chosen = ("--contestants", single, ours, "--baseline", single)
    arguments = ("--rounds", "2", *chosen, "--json", str(file))
    with started_bench(arguments, DUALDIST_STALL_WARN_SECONDS="soon") as process:
        table, errors = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, errors
    (line,) = (line for line in table.splitlines() if line.startswith("left out: "))
    assert line.startswith(f"left out: {ours}: in round 1: ")
    assert "DUALDIST_STALL_WARN_SECONDS" in line
    report = json.loads(file.read_text())
    assert {name: len(rows) for name, rows in report["rounds"].items()} == {single: 2, ours: 0}


@pytest.mark.only_all
def test_collectives_compare_callers(tmp_path: Path) -> None:
    names = ("allreduce", "broadcast", "allgather", "alltoall", "reducescatter")
    report = bench_json(tmp_path, "collectives", ("gloo", "dualdist torch+gloo"), "--bytes", "64")
    check_ratios(report, [f"{name} 64" for name in names])


@pytest.mark.only_all
def test_hosts_compares_steps_and_bytes_between_hosts(tmp_path: Path) -> None:
    need_root()
    file = tmp_path / "report.json"
    chosen = ("--hosts", "2", "--ranks", "1", "--mbit", "1000", "--ways", "gloo", "--models", "small")
    ended = subprocess.run(
        [sys.executable, "benchmarks/hosts.py", *chosen, "--rounds", "1", "--json", str(file)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (world,) = json.loads(file.read_text())["worlds"].values()
    assert list(world["small"]) == ["DDP", "optimizer", "module"]
    gradients = 120 * (32 * 32 + 32) * 4 / 1e6
    for figures in world["small"].values():
        (megabytes,) = figures["MB"]
        assert megabytes > gradients  # of two hosts, each sends as much as a rank has
