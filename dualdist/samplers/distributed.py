"""torch's DistributedSampler, with exact evaluation and resume."""

from __future__ import annotations

from collections.abc import Sequence, Sized
from typing import Any, cast

import torch

from .dealing import DealingSampler

__all__ = ("DistributedSampler",)


class DistributedSampler(DealingSampler[int], torch.utils.data.DistributedSampler[int]):
    """Deals the indices of a dataset over the ranks, in the order of torch.utils.data.DistributedSampler.

    For the same arguments and epoch the indices are those of torch's, which it is a subclass of. The shuffled order
    depends on seed and epoch alone, not on the size of the world. The global random generators are not used.

    Args:
        dataset: its length must be the same on all ranks.
        num_replicas, rank: None: those of the joined world.
        shuffle: order by `seed` and epoch; `set_epoch` must then be called before each epoch.
        seed: must be equal on all ranks.
        drop_last: leave out what does not fill the last round of all ranks.
        pad: repeat the first samples until all ranks have equally many. False: every sample exactly once, so that
            ranks differ by at most one and may have none. For evaluation without collectives in the loop, or for
            training with `join`.

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
        self.dataset = cast("torch.utils.data.Dataset[Any]", dataset)
        self.shuffle = shuffle
        self._start(num_replicas, rank, seed, drop_last, pad)

    def _length(self) -> int:
        return len(cast("Sized", self.dataset))

    def _sequence(self) -> Sequence[int]:
        if not self.shuffle:
            return range(self._length())
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        order = torch.randperm(self._length(), generator=generator)
        return order.numpy().data  # its items are plain integers, made one by one

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "shuffle": self.shuffle}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if state_dict["shuffle"] != self.shuffle:
            raise ValueError(
                f"`shuffle` must be {state_dict['shuffle']} as in `state_dict`, but is {self.shuffle} instead."
            )
        super().load_state_dict(state_dict)
