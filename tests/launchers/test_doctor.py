"""`dualdist doctor`: what it tells is what a world then finds, and its exit code says whether one could start."""

from __future__ import annotations

import json
import sys

import pytest
import torch

from dualdist.cli import main

from ..helpers.script_launch import finish, launch

DOCTOR = ("-m", "dualdist", "doctor")


def test_every_cell_that_is_said_to_be_there_starts() -> None:
    ended = finish([sys.executable, *DOCTOR, "--json", "--smoke"])
    told = json.loads(ended.output)
    available = {cell for cell, problem in told["cells"].items() if problem is None}
    assert {"torch+gloo", "torch+mpi", "horovod+gloo", "horovod+mpi"} <= available
    assert told["smoke"].keys() == available
    assert {cell: result["problem"] for cell, result in told["smoke"].items()} == dict.fromkeys(available)
    assert ended.code == 0
    assert (told["launch"]["launcher"], told["chosen"]["backend"]) == ("python", "local")
    assert told["versions"]["torch"] == torch.__version__.partition("+")[0]
    assert told["network"]["interfaces"]["lo"] == told["network"]["on_one_host"] == "127.0.0.1"
    assert told["mpi"]["thread_level"] == "multiple"


@pytest.mark.parametrize(
    ("options", "environment", "words"),
    [
        (["--backend", "torch", "--transport", "nccl"], {}, "no CUDA device is usable"),
        ([], {"WORLD_SIZE": "4"}, "`RANK` must be set beside WORLD_SIZE=4"),
        (
            ["--transport", "mpi", "--backend", "horovod"],
            {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"},
            "Start with a launcher that starts MPI",
        ),
        ([], {"DUALDIST_INTERFACE": "nowhere0"}, "`DUALDIST_INTERFACE` must name a network interface"),
    ],
)
def test_what_cannot_start_is_told_with_exit_code_1(
    options: list[str],
    environment: dict[str, str],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if "nccl" in options and torch.cuda.is_available():
        pytest.skip("NCCL can start here")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert main(["doctor", "--json", *options]) == 1
    told = json.loads(capsys.readouterr().out)
    assert words in f"{told['chosen']['problem']} {told['network']['problem']}"


def test_under_a_launcher_it_tells_the_launchers_numbers_and_where_they_came_from() -> None:
    ended = launch("torchrun", *DOCTOR)
    assert ended.code == 0
    assert ended.output.count("launcher         torchrun") == 2
    assert ended.output.count("size             2 (from WORLD_SIZE)") == 2
    assert "torch            started by torchrun" in ended.output
    assert "`transport` must be gloo or nccl under torchrun" in ended.output
