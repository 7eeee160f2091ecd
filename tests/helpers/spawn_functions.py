"""Functions for `dualdist.spawn`. They import nothing large, so that their processes start quickly."""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import Any

RANK = int(os.environ.get("DUALDIST_RANK", "0"))


class Unsendable(Exception):
    """An exception that cannot be pickled."""

    def __init__(self, one: int, other: int) -> None:
        super().__init__(f"{one} and {other}")


def describe(factor: int, text: bytes) -> tuple[int, int, int, bytes]:
    return RANK, int(os.environ["DUALDIST_SIZE"]), RANK * factor, text


def environment(name: str) -> str | None:
    return os.environ.get(name)


def block() -> None:
    signal.pause()


def fail(rank: int) -> None:
    if rank == RANK:
        raise KeyError("the reason")
    signal.pause()


def kill_itself(rank: int) -> None:
    if rank == RANK:
        os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()


def interrupt(parent: int) -> None:
    if RANK == 1:
        os.kill(parent, signal.SIGINT)
    signal.pause()


def end_with(code: int, hard: bool) -> str:
    if RANK == 1:
        if hard:
            os._exit(code)
        sys.exit(code)
    return "returned"


def raise_unsendable() -> None:
    raise Unsendable(1, 2)


def return_unsendable() -> Any:
    return threading.Lock()


def train(backend: str) -> tuple[Any, ...]:
    import torch

    import dualdist as hvd

    hvd.init()
    total = hvd.allreduce(torch.full((2,), hvd.rank() + 1.0), op=hvd.Sum)
    assert hvd.backend_name() == backend
    return hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.launcher_name(), total


def use_horovod() -> tuple[int, int, float]:
    import horovod.torch as hvd
    import torch

    hvd.init()
    return hvd.rank(), hvd.size(), hvd.allreduce(torch.tensor([hvd.rank() + 1.0]), op=hvd.Sum).item()


def use_torch() -> tuple[int, int, float]:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    total = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(total)
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    return rank, size, total.item()
