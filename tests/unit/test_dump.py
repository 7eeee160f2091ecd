"""Where a rank writes the file for `dualdist hang`, and when it takes SIGUSR2."""

from __future__ import annotations

import json
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from dualdist.cli import main
from dualdist.core.agreement.call import Call
from dualdist.core.agreement.guard import GAVE_UP
from dualdist.core.collectives.join import BARRIER
from dualdist.core.types import Settings
from dualdist.observation import dump as dump_module
from dualdist.observation.dump import Dump
from dualdist.observation.survey import StallWatch

from ..helpers.files import wait_for


@pytest.fixture
def watch() -> Iterator[StallWatch]:
    made = StallWatch(0, 2, "127.0.0.1", Settings())
    yield made
    made.close()


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """What asks for a file waits until it is there, however long the system stops the thread that writes it."""
    monkeypatch.setattr(dump_module, "_WAIT_SECONDS", 60.0)


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder below the temporary folder, for this user."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path / f"dualdist-{os.getuid()}"


def note_of(watch: StallWatch, folder: str | None = None) -> str:
    dump = Dump(watch, folder, "job")
    try:
        return watch.dump(GAVE_UP, 1)()
    finally:
        dump.close()


def test_the_folder_is_private_and_that_of_the_job(watch: StallWatch, base: Path) -> None:
    note = note_of(watch)
    assert note_of(watch) == note
    (folder,) = base.iterdir()
    assert [path.name for path in folder.iterdir()] == ["rank-0.json"]
    assert [path.stat().st_mode & 0o777 for path in (base, folder)] == [0o700, 0o700]
    assert note.endswith(f"to {folder} on its host: read them with `dualdist hang {folder}`.")


def test_only_the_newest_folders_stay(watch: StallWatch, base: Path) -> None:
    for number in range(50):
        (base / str(number)).mkdir(parents=True)
        os.utime(base / str(number), (number, number))
    note_of(watch)
    left = {path.name for path in base.iterdir()}
    assert len(left) == 20 and {str(number) for number in range(31, 50)} < left


def test_a_folder_that_belongs_to_another_user_is_refused(
    watch: StallWatch, base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "theirs").mkdir()
    base.symlink_to(tmp_path / "theirs")
    assert note_of(watch) == ""
    assert f"{base} belongs to another user" in caplog.text
    assert list((tmp_path / "theirs").iterdir()) == []


def test_only_the_last_calls_are_kept(watch: StallWatch, tmp_path: Path) -> None:
    channel = watch.add_channel("set 0", (0, 1))
    for number in range(1000):
        channel.begun(Call(BARRIER, name=str(number)))
        channel.ended()
    note_of(watch, str(tmp_path / "given"))
    file = json.loads((tmp_path / "given" / "rank-0.json").read_text())
    assert [call["name"] for call in file["calls"]] == [str(number) for number in range(800, 1000)]


def test_a_rank_that_waits_for_another_one_itself_is_not_behind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rank 0 waits for rank 1 in a process set, and rank 1 for rank 2 in another one."""
    ranks = [StallWatch(rank, 3, "127.0.0.1", Settings()) for rank in range(3)]
    for watch in ranks:
        pairs = [watch.add_channel(f"set {first}", (first, first + 1)) for first in range(2)]
        if watch.rank < 2:
            pairs[watch.rank].begun(Call(BARRIER, site=("train.py", 7)))
        note_of(watch, str(tmp_path))
        watch.close()
    assert main(["hang", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(",")[0] for line in lines if "is behind" in line] == ["Rank 2 is behind"]
    assert any(line.startswith("  ranks [1] wait for call 1 of set 1 since ") for line in lines)


def test_a_file_of_an_earlier_time_or_another_world_does_not_count(
    tmp_path: Path, watch: StallWatch, capsys: pytest.CaptureFixture[str]
) -> None:
    note_of(watch, str(tmp_path))
    file = json.loads((tmp_path / "rank-0.json").read_text())
    for changes, rank in (({"asked": file["asked"] + 10**12}, 0), ({"world": "other", "asked": 0}, 1)):
        (tmp_path / "rank-1.json").write_text(json.dumps(file | {"rank": 1} | changes))
        assert main(["hang", str(tmp_path)]) == 0
        assert f"\nRank {rank} has no file of this time: " in capsys.readouterr().out


def is_caught() -> bool:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if "SigCgt" in line)
    return bool(int(line.split()[1], 16) >> (signal.SIGUSR2 - 1) & 1)


def test_sigusr2_writes_the_file_until_the_world_is_left(watch: StallWatch, tmp_path: Path) -> None:
    dump = Dump(watch, str(tmp_path), "job")
    signal.raise_signal(signal.SIGUSR2)
    wait_for([tmp_path / "rank-0.json"])
    dump.close()
    assert not is_caught()


def test_a_handler_of_the_script_stays(watch: StallWatch, tmp_path: Path) -> None:
    received: list[int] = []
    former = signal.signal(signal.SIGUSR2, lambda number, _: received.append(number))
    try:
        dump = Dump(watch, str(tmp_path), "job")
        signal.raise_signal(signal.SIGUSR2)
        dump.close()
        signal.raise_signal(signal.SIGUSR2)
    finally:
        signal.signal(signal.SIGUSR2, former)
    assert received == [signal.SIGUSR2] * 2


def test_sigusr2_writes_the_file_in_a_world_after_one_whose_script_took_its_handler_back(
    watch: StallWatch, tmp_path: Path
) -> None:
    dump = Dump(watch, str(tmp_path), "job")
    signal.signal(signal.SIGUSR2, lambda *_: None)
    dump.close()
    signal.signal(signal.SIGUSR2, signal.SIG_DFL)
    test_sigusr2_writes_the_file_until_the_world_is_left(watch, tmp_path)


def test_a_mismatch_after_a_failure_does_not_overwrite_its_file(watch: StallWatch, tmp_path: Path) -> None:
    dump = Dump(watch, str(tmp_path), "job")
    for why in (GAVE_UP, "a call did not match on all ranks"):
        watch.dump(why, 1)()
    dump.close()
    assert json.loads((tmp_path / "rank-0.json").read_text())["why"] == GAVE_UP


def test_a_forked_process_ignores_sigusr2(watch: StallWatch, tmp_path: Path) -> None:
    dump = Dump(watch, str(tmp_path), "job")
    child = os.fork()
    if child == 0:
        dump.close(is_forked=True)
        signal.raise_signal(signal.SIGUSR2)
        os._exit(0)
    try:
        assert os.waitpid(child, 0)[1] == 0
    finally:
        dump.close()


def test_a_folder_without_files_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["hang", str(tmp_path)]) == 2
    assert f"must have files rank-N.json, but {tmp_path} has none" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "[1]", "7", "{}", '{"rank": 7, "world": "other", "asked": "now"}'])
def test_a_file_that_no_rank_has_written_is_named(
    text: str, watch: StallWatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    note_of(watch, str(tmp_path))
    foreign = tmp_path / "rank-7.json"
    foreign.write_text(text)
    assert main(["hang", str(tmp_path)]) == 2
    output, errors = capsys.readouterr()
    assert (output, errors.count("\n")) == ("", 1) and f"{foreign} is not one" in errors


def test_every_value_of_a_file_that_is_needed_is_checked(
    watch: StallWatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    watch.add_channel("set", (0, 1)).begun(Call(BARRIER, site=("train.py", 7)))
    note_of(watch, str(tmp_path))
    file = tmp_path / "rank-0.json"
    whole = json.loads(file.read_text())
    for name in whole:
        for wrong in ({}, {name: None}, {name: [None]}):
            file.write_text(json.dumps({key: whole[key] for key in whole if key != name} | wrong))
            assert main(["hang", "--flight-recorder", str(tmp_path / "traces"), str(tmp_path)]) in (0, 2)
