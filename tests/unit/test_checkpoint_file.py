"""Checkpoint files: each is complete or absent, and any damage is detected."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import socket
import stat
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dualdist.checkpoint import Manifest, read_manifest
from dualdist.checkpoint.catalog import Catalog
from dualdist.checkpoint.format import MemoryFile, copy_verified, replacing, write_checkpoint
from dualdist.errors import CheckpointError, DamagedCheckpointError

from ..helpers.faulty_file_system import CountingFileSystem, FaultyFileSystem, PowerCut

MANIFEST = Manifest(7, 2, "torch", "gloo", "2.15.0", "2026-01-31T12:00:00+00:00", 3, {"val_accuracy": 0.5})
VALUES: dict[str, Any] = {"weight": torch.arange(700_000.0), "names": ["a", "b"], "step": 7}


def write(path: Path, values: dict[str, Any], disk: CountingFileSystem | None = None) -> None:
    with contextlib.nullcontext() if disk is None else disk.in_use():
        write_checkpoint(path, values, MANIFEST)


def verified(path: Path) -> Manifest:
    return copy_verified(path, lambda piece: None)


def loaded(path: Path) -> dict[str, Any]:
    with MemoryFile() as file:
        copy_verified(path, file.append)
        return file.load(path)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    path = tmp_path / "small.pt"
    write(path, {"weight": torch.arange(3.0)})
    return path


@pytest.mark.parametrize("length", [0, 1, 1000, 2000, 3000, 5000, 70_000, 1 << 20, (1 << 20) + 5])
def test_a_file_loads_as_it_was_written_also_by_torch_and_zip_programs(tmp_path: Path, length: int) -> None:
    path = tmp_path / "a.pt"
    data = torch.arange(length, dtype=torch.uint8)
    write(path, VALUES | {"weight": data})
    assert verified(path) == read_manifest(path) == MANIFEST
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        assert json.loads(archive.comment.partition(b"\ncrc32 ")[0])["step"] == 7
    for found in (loaded(path), torch.load(path, weights_only=True)):
        assert torch.equal(found.pop("weight"), data)
        assert found == {"names": ["a", "b"], "step": 7}


def test_a_file_of_another_process_is_used_only_if_it_is_the_same() -> None:
    with MemoryFile() as own, MemoryFile() as other:
        own.append(b"own")
        other.append(b"other")
        path, status = other.address()
        assert not own.become(path, os.fstat(own.fileno())) and os.pread(own.fileno(), 9, 0) == b"own"
        assert own.become(path, status) and os.pread(own.fileno(), 9, 0) == b"other"


def test_a_flipped_bit_anywhere_is_detected(small: Path) -> None:
    data = small.read_bytes()
    with small.open("r+b", buffering=0) as file:
        for place, byte in enumerate(data):
            os.pwrite(file.fileno(), bytes([byte ^ 1 << place % 8]), place)
            with pytest.raises(DamagedCheckpointError):
                verified(small)
            os.pwrite(file.fileno(), bytes([byte]), place)
    assert verified(small) == MANIFEST


def test_a_shorter_or_longer_file_is_detected(small: Path) -> None:
    data = small.read_bytes()
    for length in [*range(0, len(data), 37), len(data) - 1]:
        small.write_bytes(data[:length])
        with pytest.raises(DamagedCheckpointError):
            verified(small)
    small.write_bytes(data + b"\n")
    with pytest.raises(DamagedCheckpointError):
        verified(small)


def test_a_file_of_torch_save_is_named_as_such_and_not_damaged(tmp_path: Path) -> None:
    path = tmp_path / "step-000000001.pt"
    torch.save({"weight": torch.zeros(3)}, path)
    for read in (verified, read_manifest):
        with pytest.raises(CheckpointError, match=r"but .* is a file of torch\.save instead") as caught:
            read(path)
        assert not isinstance(caught.value, DamagedCheckpointError)
    text = r"None of the 1 checkpoints can be loaded: .*torch\.save instead.* Move them to another folder"
    with MemoryFile() as file, pytest.raises(CheckpointError, match=text) as caught:
        Catalog(tmp_path, 1).find(file)
    assert not isinstance(caught.value, DamagedCheckpointError)


def test_a_file_that_is_replaced_keeps_its_mode_and_group(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    write(path, {})
    path.chmod(0o660)
    group = 12345 if os.geteuid() == 0 else os.getegid()
    os.chown(path, -1, group)
    write(path, VALUES)
    assert (stat.S_IMODE(path.stat().st_mode), path.stat().st_gid) == (0o660, group)


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))


def make_link_to_a_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


@pytest.mark.timeout(20)
@pytest.mark.parametrize("make", [os.mkfifo, make_socket, make_link_to_a_device, Path.mkdir])
def test_what_is_not_a_regular_file_is_refused_without_waiting_and_not_replaced(
    make: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # the path of a socket must be short
    path = Path("a.pt")
    make(path)
    kind = stat.S_IFMT(path.stat().st_mode)
    for read in (verified, read_manifest):
        with pytest.raises(DamagedCheckpointError, match=r"a\.pt is not: it is a .*, not a regular file"):
            read(path)
    with pytest.raises(FileExistsError, match="There is a folder or a special file"), replacing(path):
        pass
    assert stat.S_IFMT(path.stat().st_mode) == kind
    assert list(tmp_path.iterdir()) == [tmp_path / path]


def test_a_link_stays_and_leads_to_the_new_file(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    target, link = tmp_path / "folder" / "target", tmp_path / "link"
    target.write_bytes(b"old")
    link.symlink_to("folder/target")
    with replacing(link) as file:
        file.write(b"new")
    assert link.is_symlink()
    assert target.read_bytes() == b"new"


def test_a_newer_format_is_an_error_but_not_damage(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "a.pt", {}, Manifest(1, 1, "", "", "", "", format=2))
    with pytest.raises(CheckpointError, match=r"format 1 or older, but .* has format 2") as caught:
        verified(tmp_path / "a.pt")
    assert not isinstance(caught.value, DamagedCheckpointError)


def test_metrics_that_do_not_fit_into_the_manifest_are_an_error(tmp_path: Path) -> None:
    metrics = {f"metric {place}": 0.5 for place in range(200)}
    with pytest.raises(ValueError, match="`metrics` must fit into"):
        write_checkpoint(tmp_path / "a.pt", {}, Manifest(1, 1, "", "", "", "", 0, metrics))
    assert list(tmp_path.iterdir()) == []


class Malicious:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.folder),)


def test_a_malicious_pickle_with_a_correct_checksum_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "a.pt", {"model": Malicious(tmp_path / "made")})
    with pytest.raises(DamagedCheckpointError, match=r"a\.pt was refused: Weights only load failed"):
        loaded(tmp_path / "a.pt")
    assert not (tmp_path / "made").exists()


def test_a_failure_of_any_operation_leaves_the_old_or_the_new_file(tmp_path: Path) -> None:
    counting = CountingFileSystem()
    write(path := tmp_path / "a.pt", VALUES, counting)
    errors = zip(range(1, counting.count + 1), itertools.cycle([errno.ENOSPC, errno.EIO, errno.ESTALE]), strict=False)
    for place, number in errors:
        write(path, {"weight": torch.zeros(3)})

        def fail(count: int, name: str, place: int = place, number: int = number) -> None:
            if count == place:
                raise OSError(number, os.strerror(number))

        with pytest.raises(OSError) as caught:
            write(path, VALUES, CountingFileSystem(fail))
        assert caught.value.errno == number
        assert loaded(path)["weight"].numel() in (3, 700_000)
        assert [entry.name for entry in tmp_path.iterdir()] == ["a.pt"], f"operation {place} left something"


def test_a_power_cut_before_any_operation_leaves_the_old_or_the_new_file(tmp_path: Path) -> None:
    path, found = tmp_path / "a.pt", []
    for place in itertools.count(1):
        write(path, {"weight": torch.zeros(3)})
        disk = FaultyFileSystem(cuts_at=place)
        with contextlib.suppress(PowerCut, OSError):
            write(path, VALUES, disk)
        found.append(loaded(path)["weight"].numel())
        if disk.count < place:
            break
    assert set(found[:-1]) == {3}, "the new name is only safe after the folder is synced"
    assert found[-1] == 700_000


def test_data_reach_the_disk_before_the_rename(tmp_path: Path) -> None:
    names: list[str] = []
    write(tmp_path / "a.pt", {}, CountingFileSystem(lambda count, name: names.append(name)))
    order = [name for place, name in enumerate(names) if names[:place][-1:] != [name]]
    assert order == ["create", "write", "sync", "close", "rename", "sync_folder"]


def test_an_exception_in_the_body_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), replacing(tmp_path / "a") as file:
        file.write(b"some")
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []
