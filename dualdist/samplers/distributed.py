"""torch's DistributedSampler, with exact evaluation and resume."""

from __future__ import annotations

from collections.abc import Sequence, Sized
from typing import Any, cast

import torch

from ..checks import flag, instance, mapping
from .sharding import DealingSampler

__all__ = ("DistributedSampler",)


class DistributedSampler(DealingSampler[int], torch.utils.data.DistributedSampler[int]):
    """Shards the indices of a dataset over the ranks, in the order of torch.utils.data.DistributedSampler.

    A subclass of torch's sampler: equal arguments and epochs give equal indices. The shuffled order depends only on
    seed and epoch, not on the size of the world. The global random generators are not used.

    Args:
        dataset: its length must be equal on all ranks.
        num_replicas, rank: None: the values of the joined world.
        shuffle: shuffle by `seed` and epoch; then call `set_epoch` before each epoch.
        seed: must be equal on all ranks.
        drop_last: leave out the last samples if there are too few for all ranks.
        pad: repeat the first samples until all ranks have the same number. False: every sample exactly once, so that
            the numbers of two ranks differ by at most one and may be 0. Use False for evaluation without collectives in
            the loop, or for training with `join`.

    Raises:
        NotInitializedError: num_replicas or rank is None before `init()`.
        ValueError: rank is not below num_replicas, or both drop_last and pad=False are given.
    """

    def __init__(
        self,
        dataset: Sized,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        *,
        pad: bool = True,
    ) -> None:
        self.dataset = cast(
            "torch.utils.data.Dataset[Any]",
            instance("dataset", dataset, Sized, "a dataset with a length", "Use split_by_rank() for others."),
        )
        self.shuffle = flag("shuffle", shuffle)
        self._configure(num_replicas, rank, seed, drop_last, pad)

    def _length(self) -> int:
        return len(cast("Sized", self.dataset))

    def _sequence(self) -> Sequence[int]:
        if not self.shuffle:
            return range(self._length())
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        order = torch.randperm(self._length(), generator=generator)
        # A memoryview: its items are plain integers, each made when it is read.
        return order.numpy().data

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "shuffle": self.shuffle}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        mapping(
            "state_dict", state_dict, "shuffle", fix="Pass what state_dict() of such a sampler has returned."
        )
        if state_dict["shuffle"] != self.shuffle:
            raise ValueError(
                f"`shuffle` must be {state_dict['shuffle']} as in `state_dict`, but is {self.shuffle} instead."
            )
        super().load_state_dict(state_dict)
