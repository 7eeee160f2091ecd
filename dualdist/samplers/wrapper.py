"""Any sampler or batch sampler, sharded over the ranks."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import torch

from ..checks import instance
from .sharding import DealingSampler

__all__ = ("DistributedSamplerWrapper",)

T_co = TypeVar("T_co", covariant=True)


class DistributedSamplerWrapper(DealingSampler[T_co]):
    """Shards the items of another sampler over the ranks: of a weighted sampler, a batch sampler, or your own.

    Catalyst and Lightning have a class of the same name and purpose. All ranks draw the whole sequence of an epoch,
    with equal results: while the sampler draws, its `generator` is replaced, and the global generators of torch, numpy
    and random are seeded, by `seed` and epoch. Afterwards all generators are as before. If the sampler has a generator
    that is not torch's, it must itself draw the same items on all ranks. Its `set_epoch` is called, if it has one.

    Args:
        sampler: yields indices, or lists of them for `DataLoader(batch_sampler=)`. It must end, and draw from the whole
            dataset: a sampler that is already sharded over the ranks is refused.
        num_replicas, rank, seed, drop_last, pad: as in DistributedSampler. A batch
            sampler's items are batches, so whole batches are repeated or dropped.
    """

    def __init__(
        self,
        sampler: Iterable[T_co],
        num_replicas: int | None = None,
        rank: int | None = None,
        seed: int = 0,
        drop_last: bool = False,
        *,
        pad: bool = True,
    ) -> None:
        fix = "Pass a sampler, a batch sampler or a list."
        instance("sampler", sampler, Iterable, "a sampler or another iterable", fix)
        if any(isinstance(part, torch.utils.data.DistributedSampler) for part in _parts(sampler)):
            raise ValueError(
                "`sampler` must yield the samples of all ranks, but is already sharded over the ranks. "
                "Wrap the sampler inside it."
            )
        self.sampler = sampler
        self._cached: tuple[Any, Sequence[T_co]] = (None, ())
        """Seed and epoch, and the sequence that was drawn for them."""
        self._configure(num_replicas, rank, seed, drop_last, pad)

    def _sequence(self) -> Sequence[T_co]:
        if self._cached[0] != (self.seed, self.epoch):
            with _seeded(self.sampler, self.seed + self.epoch):
                if hasattr(self.sampler, "set_epoch"):
                    self.sampler.set_epoch(self.epoch)
                self._cached = (self.seed, self.epoch), list(self.sampler)
        return self._cached[1]


def _parts(sampler: Any) -> Iterator[Any]:
    """Yield a sampler, the sampler inside it, the sampler inside that one, and so on."""
    while sampler is not None:
        yield sampler
        sampler = getattr(sampler, "sampler", None)


@contextlib.contextmanager
def _seeded(sampler: Any, seed: int) -> Iterator[None]:
    """Seed all generators in the `with` block, and restore their states after it."""
    held = [part for part in _parts(sampler) if _has_generator(part)]
    own = [part.generator for part in held]
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        for part in held:
            part.generator = torch.Generator().manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        # The CPU's generator only: torch.manual_seed would also seed GPUs.
        torch.default_generator.manual_seed(seed)
        yield
    finally:
        for part, generator in zip(held, own, strict=True):
            part.generator = generator
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


def _has_generator(part: Any) -> bool:
    return hasattr(part, "generator") and isinstance(part.generator, torch.Generator | None)
