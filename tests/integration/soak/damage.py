"""Damages a checkpoint in many ways, and saves one on a full disk.

Each load is an error on every rank, or has the values that were saved. After a save that failed, the former one stays.
"""

from __future__ import annotations

import os
import random
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import dualdist as hvd

from .calls import WrongNumbers, check

TIMES, MOST_BYTES = 30, 1000


def _flip(data: bytearray, numbers: random.Random) -> None:
    for _ in range(numbers.choice((1, 1, 8, 100))):
        data[numbers.randrange(len(data))] ^= 1 << numbers.randrange(8)


def _cut(data: bytearray, numbers: random.Random) -> None:
    del data[numbers.randrange(len(data)) :]


def _remove(data: bytearray, numbers: random.Random) -> None:
    start = numbers.randrange(len(data))
    del data[start : start + numbers.randrange(1, 2000)]


def _insert(data: bytearray, numbers: random.Random) -> None:
    start = numbers.randrange(len(data))
    data[start:start] = numbers.randbytes(numbers.randrange(1, 2000))


def _overwrite(data: bytearray, numbers: random.Random) -> None:
    start, length = numbers.randrange(len(data)), numbers.randrange(1, 5000)
    data[start : start + length] = bytes(len(data[start : start + length]))


DAMAGES: tuple[Callable[[bytearray, random.Random], None], ...] = (_flip, _cut, _remove, _insert, _overwrite)


def _write(path: Path, data: bytes, numbers: random.Random) -> None:
    """Replace the file by a damaged one, or by something that is no file."""
    path.unlink()
    if numbers.random() < 0.1:
        os.mkfifo(path)
        return
    damaged = bytearray(data)
    for _ in range(numbers.randrange(1, 3)):
        if damaged:
            numbers.choice(DAMAGES)(damaged, numbers)
    path.write_bytes(damaged)


def _is_same(loaded: dict[str, Any], values: dict[str, Any]) -> bool:
    rest = {name: value for name, value in loaded.items() if name != "x"}
    return torch.equal(loaded["x"], values["x"]) and rest == {"y": values["y"], "z": None}


def damage_checkpoints(path: Path, seed: int) -> None:
    """Save, damage and load a checkpoint. Collective."""
    numbers = random.Random(seed)
    values: dict[str, Any] = {"x": torch.arange(3000), "y": [1.5, "text"], "z": None}
    hvd.checkpoint.save(path, values)
    data = path.read_bytes() if hvd.rank() == 0 else b""
    for turn in range(TIMES):
        if hvd.rank() == 0:
            _write(path, data, numbers)
        outcome = "same"
        try:
            if not _is_same(hvd.checkpoint.load(path), values):
                raise WrongNumbers(f"damage {turn} was loaded")
        except hvd.CheckpointError:
            outcome = "error"
        check(set(hvd.allgather_object(outcome)), {outcome}, f"outcomes of damage {turn}")
    if hvd.rank() == 0:
        path.unlink()


def save_on_full_disk(path: Path, rank: int) -> None:
    """Save twice, the second time while `rank` can write only small files. Rank 0 writes. Collective."""
    hvd.checkpoint.save(path, {"x": torch.full((3000,), 1.0)})
    _, most = before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if hvd.rank() == rank:
        resource.setrlimit(resource.RLIMIT_FSIZE, (MOST_BYTES, most))
    saved = 2.0
    try:
        hvd.checkpoint.save(path, {"x": torch.full((3000,), saved)})
    except hvd.CheckpointError:
        saved = 1.0
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    check(hvd.allgather_object(saved), [1.0 if rank == 0 else 2.0] * hvd.size(), "saves on a full disk")
    check(set(hvd.checkpoint.load(path)["x"].tolist()), {saved}, "checkpoint on a full disk")
    hvd.barrier()
    if hvd.rank() == 0:
        path.unlink()
    check([other.name for other in path.parent.glob(f"*{path.name}*")] if hvd.rank() == 0 else [], [], "rest")
