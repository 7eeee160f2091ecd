"""Scripts in the style of published ones have the same losses before and after `dualdist migrate --write`."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from dualdist.cli import main

from ..helpers.script_launch import launch
from ..helpers.world import ROOT

SCRIPTS = ROOT / "tests" / "data" / "migrate"
EXEC = ("-m", "dualdist", "exec")


def losses(name: str, *arguments: str) -> list[str]:
    # mpirun reports a failure if a process does not end the MPI of mpi4py, as a fork of one that has imported torch.
    forks = name != "mpirun" or not re.search("mpi4py|diffusion", arguments[0])
    output = launch(name, *arguments, forks=forks).check()
    found = sorted(re.findall(r"<(\d \[[^<>]+\])>", output))
    assert [line[0] for line in found] == ["0", "1"]
    return found


@pytest.mark.only_ci(where=lambda script: script != "torchrun_tutorial")
@pytest.mark.parametrize(
    ("script", "launcher", "other"),
    [
        ("horovod_mnist", "horovodrun", "torchrun"),
        ("horovod_imagenet", "horovodrun", "torchrun"),
        ("horovod_elastic", "horovodrun", "mpirun"),
        ("open_clip/train --horovod", "horovodrun", "torchrun"),
        ("diffusion/train", "mpirun", "torchrun"),
        ("slurm_variables", "mpirun", "torchrun"),
        ("torchrun_tutorial", "torchrun", "horovodrun"),
        ("spawned --nodes 1", "python", "torchrun mpirun-torch"),
    ],
)
def test_a_script_trains_the_same_after_its_changes_are_written(
    script: str, launcher: str, other: str, tmp_path: Path
) -> None:
    name, *options = script.split()
    shutil.copytree(SCRIPTS, tmp_path, dirs_exist_ok=True)
    command = [str(tmp_path / f"{name}.py"), *options]
    before = losses(launcher, *command)
    files = sorted((tmp_path / name).parent.glob("*.py")) if "/" in name else [tmp_path / f"{name}.py"]
    texts = [file.read_bytes() for file in files]
    assert main(["migrate", "--write", *map(str, files)]) in (0, 1)
    assert [file.read_bytes() for file in files] != texts
    for after in other.split() if launcher == "python" else (launcher, other):
        assert losses(after, *command) == before


@pytest.mark.only_ci
def test_a_script_that_stays_as_it_is_trains_the_same_by_dualdist_exec(tmp_path: Path) -> None:
    shutil.copytree(SCRIPTS / "open_clip", tmp_path, dirs_exist_ok=True)
    script = str(tmp_path / "train.py")
    before = losses("torchrun", script)
    main(["migrate", "--write", *map(str, tmp_path.glob("*.py"))])
    assert losses("torchrun", script) == before
    assert losses("mpirun", *EXEC, script) == before
