"""Makes collectives in two threads at the same time, in an order of their own on each rank."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch

import dualdist as hvd

from .calls import check

__all__ = ("call_in_threads",)

CALLS = 20


def call_in_threads() -> None:
    """Make named allreduces in two threads, and check their sums. Collective."""

    def work(thread: int) -> None:
        for number in range(CALLS):
            value = float((number + 1) * (thread + 1))
            found = hvd.allreduce(
                torch.full((700,), value), op=hvd.Sum, name=f"thread {thread} call {number}"
            )
            check(set(found.tolist()), {value * hvd.size()}, "allreduce in a thread")

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(work, range(2)))
