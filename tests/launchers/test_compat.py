"""dualdist.compat runs an unmodified Horovod script under every launcher, on both backends, without Horovod too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ..helpers.script_launch import LAUNCHERS, launch

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


@pytest.mark.parametrize("name", LAUNCHERS)
def test_script_runs_as_under_horovod_and_ends_quietly(name: str, tmp_path: Path) -> None:
    options = ["--worker", "2"] if name == "torchrun" else ["--option", "2"]
    ended = launch(name, "-m", "dualdist.compat", SCRIPT, str(tmp_path), *options)
    assert (ended.code, ended.output) == (0, "")
    size = LAUNCHERS[name].size
    for rank, report in enumerate(results(tmp_path, size)):
        assert report["main"] == ["__main__", "horovod_script.py", True, options]
        assert report["path"] == FOLDER
        assert report["numbers"] == [rank, size, rank, size, 0, 1]
        assert report["before"] == report["after"] == [str(number) for number in report["numbers"]]
        assert report["found"] == [
            "0.28.1",
            "dualdist.collectives.allreduce",
            "dualdist.collectives.allreduce",
        ]
        assert "horovod.tensorflow is not available" in report["refusal"]
        assert report["total"] == sum(range(size))
        assert report["weight"] == pytest.approx(5.0 - 0.5 * sum(EXAMPLES) / size)
        assert report["runs"] == RUNS[name]


def test_module_runs_where_horovod_is_not_installed(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(HIDE_HOROVOD)
    hidden = {"PYTHONPATH": str(tmp_path)}
    script = ("-m", "dualdist.compat", "-m", MODULE, str(tmp_path), "-x")
    ended = launch("torchrun", *script, environment=hidden, forks=False)
    assert ended.code == 0, ended.output
    for report in results(tmp_path, 2):
        assert report["main"] == ["__main__", "horovod_script.py", True, ["-x"]]
        assert report["runs"] == RUNS["torchrun"]


def test_an_error_in_the_script_ends_it_with_code_1(tmp_path: Path) -> None:
    script = tmp_path / "broken.py"
    script.write_text("import horovod\nhorovod.run(print, min_num_proc=3)\n")
    ended = launch("python", "-m", "dualdist.compat", str(script))
    assert ended.code == 1
    assert "start it with torchrun or horovodrun" in ended.output


def test_install_in_a_program_that_has_imported_horovod_keeps_it_as_the_backend(tmp_path: Path) -> None:
    pytest.importorskip("horovod.torch", reason="Horovod is not installed")
    script = tmp_path / "program.py"
    script.write_text(
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
    ended = launch("horovodrun", str(script))
    assert ended.code == 0, ended.output
