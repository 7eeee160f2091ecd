"""Seeds for the random generators of this process and of its data workers, only on request."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable

import numpy as np
import torch

from .core.checks import integer
from .core.lifecycle import rank, size

__all__ = ("seed_everything", "worker_init_fn")

LIMIT = 2**32
"""Seeds of numpy's generator must be smaller."""


def seed_everything(seed: int, *, rank_offset: bool | int = False) -> int:
    """Seed random, numpy and torch (GPUs too), and return the seed of this rank. Local.

    Equal seeds give equal weights on all ranks, but also equal dropout. So create the model with equal seeds, then call
    this again with `rank_offset=True` before training. `worker_init_fn` seeds the workers of a DataLoader.

    Args:
        seed: equal on all ranks, at least 0. The seed of the highest rank must be below 2**32.
        rank_offset: the seed of a rank is seed + rank_offset * rank. False or 0: the same on all ranks. True: 1.

    Raises:
        ValueError: the seed of a rank is out of range.
        NotInitializedError: with an offset, before `init()`.
    """
    seed = integer("seed", seed)
    given = int(rank_offset) if isinstance(rank_offset, bool) else rank_offset
    rank_offset = integer("rank_offset", given, least=0, below=LIMIT)
    highest = seed + rank_offset * (size() - 1) if rank_offset else seed
    if seed < 0 or highest >= LIMIT:
        raise ValueError(
            f"`seed` must be at least 0 and below 2**32 on every rank, but is {seed} with rank_offset={rank_offset}, "
            f"so {highest} on the last rank instead. Choose smaller numbers."
        )
    own = seed + rank_offset * rank() if rank_offset else seed
    random.seed(own)
    np.random.seed(own)
    torch.manual_seed(own)
    return own


def worker_init_fn(offset: int | None = None) -> Callable[[int], None]:
    """Return a `worker_init_fn` for DataLoader that gives every worker of every rank other random numbers. Local.

    torch seeds the workers from the generator of the process. If all ranks have the same seed, worker 0 of each rank
    would crop and flip in the same way. If the seed of the process is set, the numbers are reproducible.

    offset: a number that differs between the ranks. None: the rank, read now because workers may not know it.

    Raises NotInitializedError without an offset, before `init()`.
    """
    return functools.partial(_seed_worker, rank() if offset is None else integer("offset", offset, least=0))


def _seed_worker(offset: int, worker_id: int) -> None:
    # torch has already seeded this worker: a different seed in each worker and epoch, but the same on all ranks.
    sequence = np.random.SeedSequence([torch.initial_seed(), offset])
    of_torch, of_numpy, of_random = sequence.spawn(3)
    torch.manual_seed(int(of_torch.generate_state(1, np.uint64)[0]))
    np.random.seed(of_numpy.generate_state(4))
    random.seed(int(of_random.generate_state(1, np.uint64)[0]))
