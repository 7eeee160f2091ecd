"""`dualdist.run` with real processes: hosts, output, and functions that are sent by value. More is in test_spawn.py."""

from __future__ import annotations

import sys
import threading
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import dualdist as hvd
from dualdist.errors import ConfigurationError, ProcessEndedError

from ..helpers import spawn_functions
from ..helpers.requirements import need_modules
from ..helpers.script_launch import Script, finish
from ..helpers.world import ROOT

SCRIPT = str(ROOT / "tests" / "helpers" / "run_script.py")


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(ROOT)


@pytest.mark.usefixtures("hosts")
def test_large_arguments_and_results_pass_between_hosts(tmp_path: Path) -> None:
    hostfile = tmp_path / "hosts"
    hostfile.write_text("localhost slots=1\nhostA slots=1\n")
    text = b"\xff" * 3_000_000
    results = hvd.run(spawn_functions.describe, (10, text), num_proc=2, hostfile=hostfile)
    assert results == [(rank, 2, rank * 10, text) for rank in range(2)]


def test_lambdas_and_keyword_arguments_are_sent_by_value() -> None:
    need_modules("cloudpickle")
    offset = 5
    assert hvd.run(lambda x, *, y: x + y + offset, (1,), {"y": 2}, 2) == [8, 8]


def test_a_function_of_a_notebook_is_sent_by_value(monkeypatch: pytest.MonkeyPatch) -> None:
    need_modules("cloudpickle")
    notebook = ModuleType("__main__")
    exec("def work(x):\n    return helper(x)\ndef helper(x):\n    return 2 * x\n", vars(notebook))
    monkeypatch.setitem(sys.modules, "__main__", notebook)
    assert hvd.run(vars(notebook)["work"], (4,)) == [8]


def test_a_script_needs_no_main_guard(script: Script) -> None:
    need_modules("cloudpickle")
    path = script("import dualdist\ndef work(x):\n    return x + 1\nprint(dualdist.run(work, (1,), num_proc=2))\n")
    ended = finish([sys.executable, path], {"PYTHONPATH": str(ROOT)}, forks=False)
    assert (ended.code, ended.output) == (0, "[2, 2]\n")


def test_the_error_without_cloudpickle_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name, package=None: None)
    with pytest.raises(ConfigurationError, match="pip install cloudpickle"):
        hvd.run(lambda: None)
    assert hvd.run(spawn_functions.describe, (1, b"")) == [(0, 1, 0, b"")]


@pytest.mark.only_ci
def test_a_horovod_script_runs_its_own_functions_as_under_horovod() -> None:
    need_modules("cloudpickle")
    for command in (["-m", "dualdist.compat", SCRIPT, "dualdist"], [SCRIPT, "horovod"]):
        if command[-1] == "horovod":
            need_modules("horovod.torch")
        lines = finish([sys.executable, *command], {"PYTHONPATH": str(ROOT)}).check().splitlines()
        assert f"{command[-1]} [(0, 2, 6.0), (1, 2, 6.0)] {command[-1]}" in lines
        assert command[-1] == "horovod" or "rank 0 failed True" in lines


def test_output_has_the_rank_before_each_line_and_is_written_to_files(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert hvd.run(print, ("hello",), num_proc=2, output_filename=tmp_path / "logs", verbose=True) == [None, None]
    output, errors = capfd.readouterr()
    assert sorted(output.splitlines()) == ["[1,0]<stdout>:hello", "[1,1]<stdout>:hello"]
    assert errors.count("is process") == 2
    assert (tmp_path / "logs" / "rank.1" / "stdout").read_text() == "hello\n"


def test_an_interpreter_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(ProcessEndedError, match=r"Rank 0 of 1 could not be started: .*no/python"):
        hvd.run(spawn_functions.block, executable="/no/python")
    assert hvd.run(spawn_functions.describe, (1, b""), executable=sys.executable) == [(0, 1, 0, b"")]


def test_deprecated_names_warn_as_in_horovod() -> None:
    with pytest.warns(DeprecationWarning, match="np is deprecated, use num_proc instead"):
        assert len(hvd.run(spawn_functions.describe, (1, b""), np=2)) == 2
    with pytest.warns(DeprecationWarning, match="use network_interfaces instead"):
        assert hvd.run(spawn_functions.environment, ("DUALDIST_INTERFACE",), network_interface="lo,eth7") == ["lo,eth7"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_proc": 3, "hosts": "localhost:2"}, "3 instead"),
        ({"hosts": "a:1", "hostfile": "b"}, "`hosts` and `hostfile`"),
        ({"use_mpi": True}, "mpirun"),
        ({"use_mpi": True, "use_gloo": True}, "use_gloo and use_mpi"),
        ({"min_num_proc": 1}, "`min_num_proc`.*torchrun or horovodrun"),
        ({"max_np": 2}, "`max_np`.*torchrun or horovodrun"),
        ({"host_discovery_script": "x.sh"}, "`host_discovery_script`.*torchrun or horovodrun"),
        ({"transport": "mpi"}, "mpirun"),
        ({"args": (threading.Lock(),)}, "lock"),
    ],
)
def test_wrong_arguments_are_errors_that_name_them(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        hvd.run(spawn_functions.block, **options)


def test_a_wrong_variable_is_an_error_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_START_TIMEOUT", "soon")
    with pytest.raises(ConfigurationError, match=r"`HOROVOD_START_TIMEOUT` must be .* but is 'soon' instead"):
        hvd.run(spawn_functions.describe, (1, b""))
