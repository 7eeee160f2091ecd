"""`dualdist bench` with real contestants, each for one round."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dualdist.cli import bench, main

from ..helpers.world import ROOT

Report = dict[str, Any]


def bench_json(folder: Path, name: str, contestants: tuple[str, ...], *arguments: str) -> Report:
    """Return what `dualdist bench NAME` writes with --json."""
    chosen = ["--rounds", "1", "--json", str(folder / "report.json"), "--contestants", *contestants]
    ended = subprocess.run(
        [sys.executable, "-m", "dualdist", "bench", name, *chosen, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    report: Report = json.loads((folder / "report.json").read_text())
    assert not report["left_out"]
    assert list(report["rounds"]) == list(contestants)
    return report


def check_ratios(report: Report, figures: list[str]) -> None:
    rounds, ratios = report["rounds"], report["ratios"]
    assert set(ratios) == set(rounds) - {report["baseline"]}
    (theirs,) = rounds[report["baseline"]]
    for name, found in ratios.items():
        (ours,) = rounds[name]
        expected = {figure: ours[figure] / theirs[figure] for figure in figures}
        assert {figure: row["median"] for figure, row in found.items()} == pytest.approx(expected)
        assert all(row["least"] == row["median"] == row["greatest"] for row in found.values())


def test_step_compares_trainers_in_processes_of_their_own(tmp_path: Path) -> None:
    chart = tmp_path / "chart.png"
    report = bench_json(
        tmp_path, "step", ("DDP", "dualdist torch+gloo module"), "--models", "small", "--plot", str(chart)
    )
    check_ratios(report, ["small ms", "small CPU ms"])
    assert report["versions"]["torch"] and report["machine"]["cpus"]
    assert chart.read_bytes().startswith(b"\x89PNG")


def test_collectives_compare_callers(tmp_path: Path) -> None:
    names = ("allreduce", "broadcast", "allgather", "alltoall", "reducescatter")
    report = bench_json(tmp_path, "collectives", ("gloo", "dualdist torch+gloo"), "--bytes", "64")
    check_ratios(report, [f"{name} 64" for name in names])


def test_benchmarks_are_listed_with_their_purposes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench"]) == 0
    assert "step         Measures one training step of models" in capsys.readouterr().out


def test_bench_needs_a_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "_ROOT", tmp_path)
    assert main(["bench", "step"]) == 2
    assert "in a checkout of the repository" in capsys.readouterr().err
