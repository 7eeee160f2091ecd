"""The folder of elastic commits: as the user sets it, or one that no other job uses."""

from __future__ import annotations

import os
import socket
import tempfile
from pathlib import Path

import pytest

from dualdist.core.meeting import LauncherProcess
from dualdist.elastic import loop
from dualdist.elastic.loop import folder_of_commits, make_private, remove_abandoned
from dualdist.errors import CheckpointError

OWN = LauncherProcess(os.getpid(), int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]))
ENDED = LauncherProcess(OWN.pid, OWN.start_time - 1)
RUN = {"TORCHELASTIC_RUN_ID": "none"}


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def of_torchrun(torchrun: LauncherProcess, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(loop, "find_launcher_process", lambda variable: torchrun)
    made = folder_of_commits(RUN, ["train.py"], 0)
    make_private(made, RUN)
    return made


def test_a_given_folder_is_the_same_for_all_programs() -> None:
    env = RUN | {"DUALDIST_ELASTIC_DIR": "/data/job"}
    assert folder_of_commits(env, ["train.py"], 0) == Path("/data/job/run-0")
    assert folder_of_commits(env, ["train.py", "--epochs", "9"], 1) == Path("/data/job/run-1")


def test_each_job_program_and_run_has_its_own_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "find_launcher_process", lambda variable: OWN)
    folders = [
        folder_of_commits(RUN, ["train.py"], 0),
        folder_of_commits(RUN, ["train.py"], 1),
        folder_of_commits(RUN, ["tune.py"], 0),
        folder_of_commits({"TORCHELASTIC_RUN_ID": "other"}, ["train.py"], 0),
    ]
    monkeypatch.setattr(loop, "find_launcher_process", lambda variable: ENDED)
    folders.append(folder_of_commits(RUN, ["train.py"], 0))
    assert len(set(folders)) == len(folders)


def test_the_folder_does_not_depend_on_the_host_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "find_launcher_process", lambda variable: OWN)
    before = folder_of_commits(RUN, ["train.py"], 0)
    monkeypatch.setattr(socket, "gethostname", lambda: "renamed")
    assert folder_of_commits(RUN, ["train.py"], 0) == before


def test_folders_are_removed_when_their_torchrun_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    alive, ended = of_torchrun(OWN, monkeypatch), of_torchrun(ENDED, monkeypatch)
    elsewhere = ended.parents[1] / ended.parent.name.replace("elastic", "elsewhere")
    elsewhere.mkdir()
    remove_abandoned()
    assert alive.exists() and elsewhere.exists() and not ended.parent.exists()


def test_other_users_have_no_access(monkeypatch: pytest.MonkeyPatch) -> None:
    made = of_torchrun(OWN, monkeypatch)
    assert made.parent.stat().st_mode & 0o777 == 0o700


def test_a_symbolic_link_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = of_torchrun(OWN, monkeypatch)
    made.rmdir()
    made.parent.rmdir()
    made.parent.symlink_to(tmp_path)
    with pytest.raises(CheckpointError, match="must be a folder of this user"):
        make_private(made, RUN)
