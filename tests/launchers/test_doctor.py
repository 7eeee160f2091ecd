"""`dualdist doctor`: it reports what a world would find, and its exit code shows whether a world can start."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from dualdist.cli import main
from dualdist.doctor.command import _run

from ..helpers.forks import DUALDIST
from ..helpers.requirements import need_modules
from ..helpers.script_launch import finish, launch
from .test_mpis import debians_mpich

DOCTOR = ("-m", "dualdist", "doctor")


def test_every_available_backend_and_transport_starts() -> None:
    need_modules("horovod.torch", "mpi4py")
    ended = finish([*DUALDIST, "doctor", "--json", "--smoke"])
    facts = json.loads(ended.output)
    available = {name for name, problem in facts["cells"].items() if problem is None}
    assert {"torch+gloo", "torch+mpi", "horovod+gloo", "horovod+mpi"} <= available
    assert facts["smoke"].keys() == available
    assert {name: result["problem"] for name, result in facts["smoke"].items()} == dict.fromkeys(available)
    assert ended.code == 0
    assert (facts["launch"]["launcher"], facts["chosen"]["backend"]) == ("python", "local")
    assert facts["versions"]["torch"] == torch.__version__.partition("+")[0]
    assert facts["network"]["interfaces"]["lo"] == facts["network"]["on_one_host"] == "127.0.0.1"
    assert facts["mpi"]["thread_level"] == "multiple"


@pytest.mark.parametrize(
    ("options", "environment", "words"),
    [
        (["--backend", "torch", "--transport", "nccl"], {}, "no CUDA device is usable"),
        ([], {"DUALDIST_TRANSPORT": "glo"}, "`transport` must be one of nccl"),
        ([], {"WORLD_SIZE": "4"}, "`RANK` must be set beside WORLD_SIZE=4"),
        (
            ["--transport", "mpi", "--backend", "horovod"],
            {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"},
            "Start with a launcher that starts MPI",
        ),
        ([], {"DUALDIST_INTERFACE": "nowhere0"}, "`DUALDIST_INTERFACE` must name a network interface"),
    ],
)
def test_a_choice_that_cannot_start_is_reported_with_exit_code_1(
    options: list[str],
    environment: dict[str, str],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    need_modules(*["mpi4py"] * ("starts MPI" in words))
    if "nccl" in options and torch.cuda.is_available():
        pytest.skip("NCCL can start here")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert main(["doctor", "--json", *options]) == 1
    facts = json.loads(capsys.readouterr().out)
    assert words in f"{facts['chosen']['problem']} {facts['network']['problem']}"


@pytest.mark.parametrize(
    ("printed", "problem"),
    [
        ("  raise ValueError(port)\nValueError: the port is taken\nrank 1 ended\n", "ValueError: the port is taken"),
        ("no MPI\n\n", "no MPI"),
        ("", "exit code 3"),
    ],
)
def test_the_problem_of_a_process_is_the_message_of_its_error(printed: str, problem: str) -> None:
    assert _run([sys.executable, "-c", f"print({printed!r}); exit(3)"], {}, 60.0)[1] == problem


def test_under_a_launcher_it_shows_the_launchers_numbers_and_their_sources() -> None:
    ended = launch("torchrun", *DOCTOR)
    assert ended.code == 0
    assert ended.output.count("launcher         torchrun") == 2
    assert ended.output.count("size             2 (from WORLD_SIZE)") == 2
    assert "torch            started by torchrun" in ended.output
    assert "`transport` must be gloo or nccl under torchrun" in ended.output


@pytest.mark.only_ci
def test_mpich_is_named_whose_version_has_many_lines(tmp_path: Path) -> None:
    need_modules("mpi4py")
    mpich = {"LD_LIBRARY_PATH": str(debians_mpich(tmp_path)), "MPI4PY_MPIABI": "mpich"}
    ended = finish([sys.executable, *DOCTOR, "--json"], mpich, forks=False)
    facts = json.loads(ended.output)["mpi"]
    assert facts["library"].startswith("MPICH Version:") and "\n" not in facts["library"]
    assert (facts["thread_level"], facts["problem"], ended.code) == ("multiple", None, 0)
