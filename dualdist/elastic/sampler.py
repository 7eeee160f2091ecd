"""Which samples a rank trains on, when the ranks may change in the middle of an epoch."""

from __future__ import annotations

import itertools
import logging
import math
import random
from collections.abc import Iterator, Sized
from typing import Any

import torch

from ..world.numbers import rank, size

__all__ = ("ElasticSampler",)

logger = logging.getLogger("dualdist")


class ElasticSampler(torch.utils.data.Sampler[int]):
    """Deals out the samples of a dataset that this epoch has not seen yet, evenly over the ranks.

    The same arithmetic as horovod/torch/elastic/sampler.py: indices are shuffled alike on all ranks, those that were
    processed are cut off in front, and the rest is padded from its own start. Give it to `TorchState`, call
    `record_batch` after each batch, and `set_epoch` at the end of each epoch.

    dataset: its length must be the same on all ranks and stay so. seed: must be equal on all ranks.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.processed_num = 0
        self._warned = False
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin `epoch` with all samples. Call it at the end of the epoch before, not when one is resumed."""
        self.epoch = epoch
        self.processed_num = 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Note that every rank has processed a batch of `batch_size` samples."""
        if self.processed_num >= len(self.dataset) and self.rank == 0 and not self._warned:
            self._warned = True
            logger.warning(
                "ElasticSampler: all %d samples of epoch %d were processed before this batch. Call set_epoch() at the "
                "end of each epoch: after a reset nothing is left to train on otherwise.",
                len(self.dataset),
                self.epoch,
            )
        self.processed_num += batch_size * self.num_replicas

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go to where `state_dict` was taken, with the ranks of now."""
        self.epoch = state_dict["epoch"]
        self.processed_num = state_dict["processed_num"]
        self.reset()

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch and how many samples all ranks together have processed in it."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def reset(self) -> None:
        """Deal out what is left to the ranks of now."""
        self.num_replicas, self.rank = size(), rank()
        indices = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(indices)
        self.remaining_indices = indices[self.processed_num :]
        self.num_samples = math.ceil(len(self.remaining_indices) / self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        padded = itertools.islice(itertools.cycle(self.remaining_indices), self.total_size)
        self.indices = list(padded)[self.rank :: self.num_replicas]
        return iter(self.indices)

    def __len__(self) -> int:
        return self.num_samples
