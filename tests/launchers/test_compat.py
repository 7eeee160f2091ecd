"""dualdist.compat runs an unmodified Horovod script under every launcher, on both backends, without Horovod too."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ..helpers.forks import BIN
from ..helpers.namespace_hosts import Network
from ..helpers.requirements import need_modules
from ..helpers.script_launch import LAUNCHERS, Script, launch
from ..helpers.world import ROOT

SCRIPT = "tests/helpers/horovod_script.py"
MODULE = "tests.helpers.horovod_script"
FOLDER = str(Path(__file__).parents[1] / "helpers")
EXAMPLES = (1.0, 2.0, 3.0, 4.0)
RUNS = {
    "python": ["local", "python"],
    "torchrun": ["torch", "torchrun"],
    "torchrun-horovod": ["horovod", "torchrun"],
    "horovodrun": ["horovod", "horovodrun"],
    "mpirun": ["horovod", "mpirun"],
    "mpirun-torch": ["torch", "mpirun"],
}
HIDE_HOROVOD = """
import sys
from importlib.machinery import PathFinder

class Finder(PathFinder):
    @classmethod
    def find_spec(cls, fullname, path=None, target=None):
        spec = super().find_spec(fullname, path, target)
        absent = spec is not None and fullname == "horovod" and "site-packages" in (spec.origin or "")
        return None if absent else spec

sys.meta_path[sys.meta_path.index(PathFinder)] = Finder
"""


def results(folder: Path, size: int) -> list[dict[str, Any]]:
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(size)]


def check(folder: Path, places: Sequence[tuple[int, ...]], options: list[str], runs: list[str]) -> None:
    """See what SCRIPT has written on each rank. places: local rank, local size, cross rank and cross size of each."""
    size = len(places)
    for rank, report in enumerate(results(folder, size)):
        assert report["main"] == ["__main__", "horovod_script.py", True, options]
        assert report["path"] == FOLDER
        assert report["numbers"] == [rank, size, *places[rank]]
        assert report["before"] == report["after"] == [str(number) for number in report["numbers"]]
        assert report["found"] == ["0.28.1", *["dualdist.core.collectives.allreduce"] * 2]
        assert "horovod.tensorflow is not available" in report["refusal"]
        assert report["total"] == sum(range(size))
        assert report["weight"] == pytest.approx(5.0 - 0.5 * sum(EXAMPLES) / size)
        assert report["runs"] == runs


@pytest.mark.only_ci(where=lambda name: name == "torchrun-horovod" or "mpirun" in name)
@pytest.mark.parametrize("name", LAUNCHERS)
def test_script_runs_as_under_horovod_makes_a_group_of_torch_and_ends_quietly(name: str, tmp_path: Path) -> None:
    options = ["--worker", "2"] if name == "torchrun" else ["--option", "2"]
    ended = launch(name, "-m", "dualdist.compat", SCRIPT, str(tmp_path), *options)
    assert (ended.code, ended.output) == (0, "")
    size = LAUNCHERS[name].size
    check(tmp_path, [(rank, size, 0, 1) for rank in range(size)], options, RUNS[name])


@pytest.mark.only_ci
@pytest.mark.parametrize("backend", ["torch", "horovod"])
def test_script_runs_as_under_horovod_on_two_hosts(backend: str, network: Network, tmp_path: Path) -> None:
    need_modules(backend)
    run = (sys.executable, "-m", "dualdist", "run", "-H", "alpha:2,beta:2", "--backend", backend)
    network.finish(*run, sys.executable, "-m", "dualdist.compat", f"{ROOT}/{SCRIPT}", str(tmp_path)).check()
    check(tmp_path, [(rank % 2, 2, rank // 2, 2) for rank in range(4)], [], [backend, "dualdist run"])


def test_module_runs_where_horovod_is_not_installed(script: Script, tmp_path: Path) -> None:
    start = "import runpy\nrunpy.run_module('dualdist.compat', run_name='__main__', alter_sys=True)\n"
    arguments = (script(HIDE_HOROVOD + start), "-m", MODULE, str(tmp_path), "-x")
    launch("torchrun", *arguments, environment={"PYTHONPATH": str(ROOT)}).check()
    for report in results(tmp_path, 2):
        assert report["main"] == ["__main__", "horovod_script.py", True, ["-x"]]
        assert report["runs"] == RUNS["torchrun"]


def test_an_error_in_the_script_ends_it_with_code_1(script: Script) -> None:
    path = script("import horovod\nhorovod.run(print, min_num_proc=3)\n")
    ended = launch("python", "-m", "dualdist.compat", path)
    assert ended.code == 1
    assert "start it with torchrun or horovodrun" in ended.output


@pytest.mark.parametrize("controller", ["--gloo", "--mpi"])
def test_horovodrun_in_a_script_starts_processes_that_use_dualdist(controller: str, script: Script) -> None:
    need_modules("horovod.torch")
    worker = "import horovod.torch as hvd; hvd.init(); print(hvd.size(), hvd.allreduce.__module__)"
    command = [f"{BIN}/horovodrun", "-np", "2", controller, sys.executable, "-c", worker]
    path = script(f"import subprocess\nsubprocess.run({command}, check=True)\n")
    ended = launch("python", "-m", "dualdist.compat", path)
    assert ended.code == 0, ended.output
    assert ended.output.count("2 dualdist.core.collectives.allreduce") == 2


def test_install_in_a_program_that_has_imported_horovod_keeps_it_as_the_backend(script: Script) -> None:
    path = script(
        "import horovod.torch as real\n"
        "import dualdist.compat\n"
        "real.init()\n"
        "dualdist.compat.install()\n"
        "dualdist.compat.install()\n"
        "import horovod.torch as hvd\n"
        "assert hvd is not real and hvd.allreduce is dualdist.allreduce\n"
        "hvd.init()\n"
        "assert dualdist.backend_name() == 'horovod'\n"
        "assert hvd.allgather_object(hvd.rank()) == [0, 1]\n"
    )
    launch("horovodrun", path).check()
