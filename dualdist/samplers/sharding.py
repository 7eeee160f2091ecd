"""Sharding one global sequence over the ranks, from an offset that is valid in a world of any size.

A DataLoader with workers draws batches from its sampler before they are trained on. So the number of drawn samples is
not the offset: the training loop must report the consumed samples with `advance`. The sampler raises an error where it
can detect that the loop forgets this, or counts other samples than those of this rank.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import torch

from ..checks import flag, integer, mapping
from ..world.ranks import rank as own_rank
from ..world.ranks import size

__all__ = ("DealingSampler", "checked_epoch", "checked_seed", "given_or_joined_world")

T_co = TypeVar("T_co", covariant=True)


def checked_epoch(epoch: Any, name: str = "epoch") -> int:
    """Return the argument `epoch` as an int. Raises TypeError or ValueError."""
    return integer(name, epoch, least=0, below=1 << 32)


def checked_seed(seed: Any, name: str = "seed") -> int:
    """Return the argument `seed` as an int. torch accepts its sum with an epoch. Raises TypeError or ValueError."""
    return integer(name, seed, least=-(1 << 63), below=(1 << 64) - (1 << 32))


def given_or_joined_world(num_replicas: int | None, rank: int | None) -> tuple[int, int]:
    """Return the number of ranks and this process's rank: the arguments, or where they are None, the joined world's."""
    num_replicas = size() if num_replicas is None else integer("num_replicas", num_replicas, least=1)
    rank = own_rank() if rank is None else integer("rank", rank)
    if not 0 <= rank < num_replicas:
        raise ValueError(
            f"`rank` must be at least 0 and less than num_replicas={num_replicas}, but is {rank} instead. "
            "Pass hvd.rank() and hvd.size(), or neither."
        )
    return num_replicas, rank


class DealingSampler(torch.utils.data.Sampler[T_co]):
    """The base class of samplers that shard a global sequence over the ranks. Subclasses define the sequence.

    The items are samples, or batches if a batch sampler was wrapped. `len()` is the number of items that this rank gets
    from the current offset to the end of the epoch. After `load_state_dict` it is less than in a whole epoch.

        sampler.load_state_dict(checkpoint["sampler"])           # on every rank, when a run is resumed
        for epoch in range(sampler.epoch, epochs):
            sampler.set_epoch(epoch)                             # keeps the offset of a resumed epoch
            for images, labels in loader:
                ...                                              # a training step
                sampler.advance(len(images))                     # on every rank, its own samples
                checkpoint = {"sampler": sampler.state_dict()}   # as often as you like; keep that of rank 0

    Do not use it with torchdata's StatefulDataLoader, which saves the drawn samples as the position.
    """

    epoch: int
    seed: int
    num_replicas: int
    rank: int
    drop_last: bool
    num_samples: int
    total_size: int

    @abstractmethod
    def _sequence(self) -> Sequence[T_co]:
        """Return all items of this epoch in order, equal on all ranks."""

    def _length(self) -> int:
        return len(self._sequence())

    def _configure(
        self, num_replicas: int | None, rank: int | None, seed: int, drop_last: bool, pad: bool
    ) -> None:
        """Start epoch 0. None: the value of the joined world, read again at each new offset or epoch."""
        drop_last, pad = flag("drop_last", drop_last), flag("pad", pad)
        if drop_last and not pad:
            raise ValueError(
                "`pad` must be True with drop_last=True, but is False instead. "
                "Use only pad=False to have every sample once, or only drop_last=True to leave the rest out."
            )
        self._given_world = num_replicas, rank
        seed = checked_seed(seed)
        self.epoch, self.seed, self.drop_last, self.pad = 0, seed, drop_last, pad
        self._start_at(0)

    def _start_at(self, offset: int) -> None:
        """Start a pass at `offset` in the global sequence."""
        self.num_replicas, self.rank = given_or_joined_world(*self._given_world)
        self._offset, self._drawn, self._consumed = offset, 0, 0
        remaining = self._length() - offset
        rounds, rest = divmod(remaining, self.num_replicas)
        if self.drop_last:
            self.total_size = rounds * self.num_replicas
        elif self.pad:
            self.total_size = (rounds + (rest > 0)) * self.num_replicas
        else:
            self.total_size = remaining
        self.num_samples = len(self._shard())

    def _shard(self) -> range:
        """Return the indices of this rank's items. Indices after its end mean its first items again."""
        return range(self._offset + self.rank, self._offset + self.total_size, self.num_replicas)

    def __len__(self) -> int:
        return self.num_samples

    def __iter__(self) -> Iterator[T_co]:
        """Return this rank's items from the offset on.

        Raises RuntimeError when items were consumed since the pass started. `set_epoch` starts the next pass.
        """
        if self._consumed:
            raise RuntimeError(
                f"`set_epoch` must be called before each pass, but {self._consumed} samples of this one are consumed "
                "already. To continue in the middle of it: sampler.load_state_dict(sampler.state_dict())."
            )
        return self._draw(self._sequence(), self._shard())

    def _draw(self, sequence: Sequence[T_co], shard: range) -> Iterator[T_co]:
        for drawn, index in enumerate(shard, 1):
            self._drawn = max(self._drawn, drawn)
            yield sequence[index % len(sequence)]

    def set_epoch(self, epoch: int) -> None:
        """Start a pass over `epoch`: at its first item, or at the offset that `load_state_dict` set for this epoch."""
        epoch = checked_epoch(epoch)
        resumed = epoch == self.epoch and not self._consumed
        self.epoch = epoch
        self._start_at(self._offset if resumed else 0)

    def advance(self, num_samples: int) -> None:
        """Record that this rank has consumed its next `num_samples` samples, and every other rank as many.

        num_samples: of this rank alone: `len(batch)`, also for a shorter last batch; 1 for a batch when a batch sampler
        is wrapped. Local. Raises ValueError when it is more than was drawn and not yet counted.
        """
        uncounted = self._drawn - self._consumed
        num_samples = integer("num_samples", num_samples)
        if not 0 <= num_samples <= uncounted:
            raise ValueError(
                f"`num_samples` must be at least 0 and at most the {uncounted} samples that rank {self.rank} has drawn "
                f"and not yet counted, but is {num_samples} instead. Count each batch of this rank alone, once."
            )
        self._consumed += num_samples

    @property
    def num_consumed(self) -> int:
        """The number of items of this epoch that all ranks have consumed. At the end, it includes dropped items."""
        if self.drop_last and self._consumed == self.num_samples:
            return self._length()
        return min(self._offset + self._consumed * self.num_replicas, self._length())

    def state_dict(self) -> dict[str, Any]:
        """Return the offset in the global sequence, for a world of any size. Local.

        Keep the state of rank 0: no rank gets more samples, so its last state is the end of the epoch. Raises
        RuntimeError when all samples were drawn and none was counted, because the state would be the epoch's start.
        """
        if self._drawn == self.num_samples > 0 and not self._consumed:
            raise RuntimeError(
                f"`advance` must be called after each batch, but none of the {self._drawn} drawn samples is counted. "
                "Call sampler.advance(len(batch)) in the loop."
            )
        return {
            "epoch": self.epoch,
            "seed": self.seed,
            "num_consumed": self.num_consumed,
            "length": self._length(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume in the current world, with the seed of `state_dict`; no sample is repeated or skipped.

        Call it on every rank, with the state of rank 0. Raises ValueError when the sequence had another length.
        """
        keys = ("epoch", "seed", "num_consumed", "length")
        mapping("state_dict", state_dict, *keys, fix="Pass what state_dict() of such a sampler has returned.")
        epoch = checked_epoch(state_dict["epoch"], "state_dict['epoch']")
        seed = checked_seed(state_dict["seed"], "state_dict['seed']")
        length = integer("state_dict['length']", state_dict["length"], least=0)
        consumed = integer(
            "state_dict['num_consumed']", state_dict["num_consumed"], least=0, below=length + 1
        )
        self.epoch, self.seed = epoch, seed
        if self._length() != length:
            raise ValueError(
                f"`state_dict` must be of a sampler of {self._length()} items, but has {length} instead. "
                "Resume with the same data, or start at the next epoch: set_epoch(state_dict['epoch'] + 1)."
            )
        self._start_at(consumed)

    def reset(self) -> None:
        """Shard the remaining items over the current ranks. `elastic.TorchState` calls it in a new world."""
        self._start_at(self.num_consumed)
