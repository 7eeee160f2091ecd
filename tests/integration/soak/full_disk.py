"""Saves a checkpoint on a disk that is full for one rank. The former checkpoint stays."""

from __future__ import annotations

import resource
from pathlib import Path

import torch

import dualdist as hvd

from .calls import check

__all__ = ("save_on_full_disk",)

MOST_BYTES = 1000


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
