"""Any sampler or batch sampler, dealt out over the ranks."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import torch

from .dealing import DealingSampler

__all__ = ("DistributedSamplerWrapper",)

T_co = TypeVar("T_co", covariant=True)


class DistributedSamplerWrapper(DealingSampler[T_co]):
    """Deals what another sampler draws over the ranks: weighted samplers, batch samplers, your own.

    The name is that of the class for it in Catalyst and Lightning. All ranks draw the whole sequence of an epoch,
    alike, by `seed` and epoch: while the sampler draws, its `generator` is replaced, and the global generators of
    torch, numpy and random are seeded; afterwards they are as before. A sampler which holds a generator that is not
    torch's must draw alike on all ranks by itself. Its `set_epoch` is called, if it has one.

    Args:
        sampler: yields indices, or lists of them for `DataLoader(batch_sampler=)`. It must end, and see the whole
            dataset: samplers that are split over the ranks already are refused.
        num_replicas, rank, seed, drop_last, pad: as in DistributedSampler; what is repeated or dropped are items, so
            whole batches of a batch sampler.
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
        if any(isinstance(part, torch.utils.data.DistributedSampler) for part in _parts(sampler)):
            raise ValueError(
                "`sampler` must yield the samples of all ranks, but is split over the ranks already. "
                "Wrap the sampler that it is made of."
            )
        self.sampler = sampler
        self._known: tuple[Any, Sequence[T_co]] = (None, ())
        self._start(num_replicas, rank, seed, drop_last, pad)

    def _sequence(self) -> Sequence[T_co]:
        if self._known[0] != (self.seed, self.epoch):
            with _seeded(self.sampler, self.seed + self.epoch):
                if hasattr(self.sampler, "set_epoch"):
                    self.sampler.set_epoch(self.epoch)
                self._known = (self.seed, self.epoch), list(self.sampler)
        return self._known[1]


def _parts(sampler: Any) -> Iterator[Any]:
    """Yield a sampler, the one that it wraps, and so on."""
    while sampler is not None:
        yield sampler
        sampler = getattr(sampler, "sampler", None)


@contextlib.contextmanager
def _seeded(sampler: Any, seed: int) -> Iterator[None]:
    """Draw by `seed` alone inside, and leave every generator as it was."""
    held = [part for part in _parts(sampler) if _has_generator(part)]
    own = [part.generator for part in held]
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        for part in held:
            part.generator = torch.Generator().manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.default_generator.manual_seed(seed)  # that of the CPU: torch.manual_seed would seed GPUs too
        yield
    finally:
        for part, generator in zip(held, own, strict=True):
            part.generator = generator
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


def _has_generator(part: Any) -> bool:
    return hasattr(part, "generator") and isinstance(part.generator, torch.Generator | None)
