"""The samples of each rank when the number of ranks may change in the middle of an epoch."""

from __future__ import annotations

import itertools
import logging
import math
import random
from collections.abc import Iterator, Sized
from typing import Any, cast

import torch

from ..checks import flag, instance, integer, mapping
from ..samplers.sharding import checked_epoch, checked_seed
from ..world.ranks import rank, size

__all__ = ("ElasticSampler",)

logger = logging.getLogger("dualdist")


class ElasticSampler(torch.utils.data.Sampler[int]):
    """Partitions the samples that this epoch has not processed yet evenly over the ranks.

    Same arithmetic as horovod/torch/elastic/sampler.py: all ranks shuffle the indices in the same way, remove the
    processed ones from the front, and pad the rest with its own first indices. Give the sampler to `TorchState`, call
    `record_batch` after each batch, and `set_epoch` at the end of each epoch.

    dataset: its length must be equal on all ranks and must not change. seed: must be equal on all ranks.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset = cast("Sized", instance("dataset", dataset, Sized, "a dataset with a length"))
        self.shuffle = flag("shuffle", shuffle)
        self.seed = checked_seed(seed)
        self.epoch = 0
        self.processed_num = 0
        self._warned = False
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Start `epoch` with all samples. Call it at the end of the previous epoch, not after resuming an epoch."""
        self.epoch = checked_epoch(epoch)
        self.processed_num = 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Record that every rank has processed a batch of `batch_size` samples."""
        integer("batch_idx", batch_idx, least=0)
        batch_size = integer("batch_size", batch_size, least=0)
        if self.processed_num >= len(self.dataset) and self.rank == 0 and not self._warned:
            self._warned = True
            logger.warning(
                "ElasticSampler: all %d samples of epoch %d were processed before this batch. Call set_epoch() at the "
                "end of each epoch. Otherwise no samples are left after a reset.",
                len(self.dataset),
                self.epoch,
            )
        self.processed_num += batch_size * self.num_replicas

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue where `state_dict` was taken, partitioned over the current ranks."""
        fix = "Pass what state_dict() of an ElasticSampler has returned."
        mapping("state_dict", state_dict, "epoch", "processed_num", fix=fix)
        epoch = checked_epoch(state_dict["epoch"], "state_dict['epoch']")
        self.processed_num = integer("state_dict['processed_num']", state_dict["processed_num"], least=0)
        self.epoch = epoch
        self.reset()

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch, and the number of samples that all ranks together have processed in it."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def reset(self) -> None:
        """Partition the remaining samples over the current ranks."""
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
