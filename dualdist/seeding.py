"""Seeding the random generators of this process and of its data workers, when you ask for it and never otherwise."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable

import numpy as np
import torch

from .world.numbers import rank, size

__all__ = ("seed_everything", "worker_init_fn")

LIMIT = 2**32
"""numpy's generator takes seeds below this."""


def seed_everything(seed: int, *, rank_offset: bool | int = False) -> int:
    """Seed random, numpy and torch, with the GPUs, and return the seed that this rank got. Local.

    Equal seeds make equal weights on all ranks, and also equal dropout: make the model with the first, train with
    `rank_offset=True`. The workers of a DataLoader are seeded by `worker_init_fn`.

    Args:
        seed: equal on all ranks; at least 0 and, with the highest rank's offset, below 2**32.
        rank_offset: how much to add for each rank: False or 0 is the same seed on all ranks, True or 1 is seed + rank,
            n is seed + n * rank.

    Raises:
        ValueError: a seed, of any rank, is out of range.
        NotInitializedError: there is an offset, but no world before `init()`.
    """
    highest = seed + rank_offset * (size() - 1) if rank_offset else seed
    if seed < 0 or rank_offset < 0 or highest >= LIMIT:
        raise ValueError(
            f"`seed` must be at least 0 and below 2**32 on every rank, but is {seed} with rank_offset={rank_offset}, "
            f"so {highest} on the last rank instead."
        )
    own = seed + rank_offset * rank() if rank_offset else seed
    random.seed(own)
    np.random.seed(own)
    torch.manual_seed(own)
    return own


def worker_init_fn(offset: int | None = None) -> Callable[[int], None]:
    """Return a `worker_init_fn` for DataLoader, by which no two workers of any ranks draw the same numbers.

    torch seeds the workers from the generator of the process. Where that is equal on all ranks, so are the random
    augmentations: worker 0 of each rank would crop and flip alike. Reproducible when the process is.

    offset: what tells this rank from the others; None: its rank, taken now, since workers may not know it.
    """
    return functools.partial(_seed_worker, rank() if offset is None else offset)


def _seed_worker(offset: int, worker_id: int) -> None:
    # torch has seeded this worker already, otherwise in each worker and epoch, but alike on all ranks.
    sequence = np.random.SeedSequence([torch.initial_seed(), offset])
    of_torch, of_numpy, of_random = sequence.spawn(3)
    torch.manual_seed(int(of_torch.generate_state(1, np.uint64)[0]))
    np.random.seed(of_numpy.generate_state(4))
    random.seed(int(of_random.generate_state(1, np.uint64)[0]))
