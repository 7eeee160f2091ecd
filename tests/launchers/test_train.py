"""The flagship example under every launcher: it trains to the same numbers, and ends well in every way."""

from __future__ import annotations

import json
import math
import sys
from typing import Any

import pytest

from ..helpers.script_launch import LAUNCHERS, Script, finish, launch
from .test_examples import SCRIPT

TRAIN = "examples/train.py"


SAID = ("cnn on digits", "epoch 1", "epoch 2", "validation accuracy")
"""What each line of a run of two epochs says."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The metrics of two epochs, by launcher."""
    metrics = {}
    for name in LAUNCHERS:
        file = tmp_path_factory.mktemp("metrics") / "metrics.json"
        ended = launch(name, TRAIN, "--epochs", "2", "--metrics", str(file))
        assert ended.code == 0
        assert len(ended.output.splitlines()) == len(SAID)
        assert all(map(str.__contains__, ended.output.splitlines(), SAID))
        metrics[name] = json.loads(file.read_text())
    return metrics


@pytest.mark.only_ci
def test_every_launcher_trains_the_same_model(trained: dict[str, dict[str, Any]]) -> None:
    expected, *others = [trained[name] for name in LAUNCHERS if LAUNCHERS[name].size == 2]
    assert len(others) == 4
    for metrics in others:
        for ours, theirs in zip(metrics["epochs"], expected["epochs"], strict=True):
            # The sum of two ranks' numbers has one order.
            assert ours["train_loss"] == theirs["train_loss"]
            assert ours["val_accuracy"] == theirs["val_accuracy"]


@pytest.mark.only_ci
def test_metrics_say_what_ran(trained: dict[str, dict[str, Any]]) -> None:
    said = {name: (m["backend"], m["transport"], m["launcher"], m["world_size"]) for name, m in trained.items()}
    assert said == {
        "python": ("local", "local", "python", 1),
        "torchrun": ("torch", "gloo", "torchrun", 2),
        "torchrun-horovod": ("horovod", "gloo", "torchrun", 2),
        "horovodrun": ("horovod", "gloo", "horovodrun", 2),
        "mpirun": ("horovod", "mpi", "mpirun", 2),
        "mpirun-torch": ("torch", "gloo", "mpirun", 2),
    }


@pytest.mark.only_ci
def test_a_run_learns_and_counts_every_validation_image_once(trained: dict[str, dict[str, Any]]) -> None:
    for metrics in trained.values():
        assert metrics["epochs"][-1]["val_accuracy"] > 0.9
        correct = metrics["val_accuracy"] * 360  # a fifth of 1,797 images
        assert math.isclose(correct, round(correct), abs_tol=1e-6)
        assert metrics["val_accuracy"] == metrics["epochs"][-1]["val_accuracy"]


WRONG = {
    "--model": "--model no-such-model",
    "--data-dir": "--data imagefolder --data-dir no/such/folder",
    "--batch-size": "--batch-size 0",
    "`backend`": "--backend carrier-pigeon",
    "`transport`": "--transport carrier-pigeon",
}


def test_a_wrong_option_ends_with_one_line_that_names_it(script: Script) -> None:
    path = script(
        "import sys\nsys.stderr = type('', (), {'__getattr__': lambda _, name: getattr(sys.stdout, name)})()\n" + SCRIPT
    )
    ended = launch("python", path, json.dumps([f"train.py {options}" for options in WRONG.values()]))
    told = [json.loads(line) for line in ended.output.splitlines()]
    for name, (code, text) in zip(WRONG, told, strict=True):
        assert code == 2
        (line,) = text.splitlines()
        assert name in line


def test_a_rank_that_fails_alone_names_the_wrong_option() -> None:
    own_epochs = 'exec "$@" --epochs "$((1 - RANK))"'
    run = [sys.executable, "-m", "dualdist", "run", "-np", "2", "sh", "-c", own_epochs, "sh"]
    ended = finish([*run, sys.executable, TRAIN])
    assert ended.code == 2
    (line,) = (line for line in ended.output.splitlines() if "train.py: error" in line)
    assert "--epochs" in line
    assert "Traceback" not in ended.output


def test_choosing_horovod_without_horovod_is_one_line_with_the_remedy() -> None:
    source = (
        "import runpy, sys\n"
        "sys.modules['horovod'] = None\n"  # what an import finds when it is not installed
        f"sys.path.insert(0, 'examples')\nrunpy.run_path({TRAIN!r}, run_name='__main__')\n"
    )
    ended = launch("python", "-c", source, "--backend", "horovod")
    assert ended.code == 2
    (line,) = ended.output.splitlines()
    assert "horovod is not installed" in line
    assert "dualdist install-horovod" in line
