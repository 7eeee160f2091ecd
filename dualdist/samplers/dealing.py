"""Dealing one sequence out to the ranks, from a position that survives a restart on another world.

A DataLoader with workers draws from its sampler batches ahead of those that were trained on. So the position is not
what was drawn: the loop says what it has consumed, with `advance`. What can be noticed of forgetting it, or of counting
another thing than this rank's own samples, is an error.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import torch

from ..world.numbers import rank as own_rank
from ..world.numbers import size

__all__ = ("DealingSampler", "place_of")

T_co = TypeVar("T_co", covariant=True)


def place_of(num_replicas: int | None, rank: int | None) -> tuple[int, int]:
    """Return how many ranks there are and which one we are: as given, else those of the joined world."""
    num_replicas = size() if num_replicas is None else num_replicas
    rank = own_rank() if rank is None else rank
    if not 0 <= rank < num_replicas:
        raise ValueError(
            f"`rank` must be at least 0 and less than num_replicas={num_replicas}, but is {rank} instead."
        )
    return num_replicas, rank


class DealingSampler(torch.utils.data.Sampler[T_co]):
    """The base of the samplers that deal a global sequence over the ranks; subclasses say which sequence.

    The items are samples, or batches where a batch sampler was wrapped. `len()` is how many this rank gets from the
    position on: until the end of the epoch, so less than in a whole epoch after `load_state_dict`.

        sampler.load_state_dict(checkpoint["sampler"])           # on every rank, when a run is resumed
        for epoch in range(sampler.epoch, epochs):
            sampler.set_epoch(epoch)                             # keeps the position of the epoch that was resumed
            for images, labels in loader:
                ...                                              # a training step
                sampler.advance(len(images))                     # on every rank, its own samples
                checkpoint = {"sampler": sampler.state_dict()}   # as often as you like; keep that of rank 0

    Do not give it to torchdata's StatefulDataLoader, which would save its position by itself while it draws ahead.
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
        """Return all items of this epoch in their order, equal on all ranks."""

    def _length(self) -> int:
        return len(self._sequence())

    def _start(
        self, num_replicas: int | None, rank: int | None, seed: int, drop_last: bool, pad: bool
    ) -> None:
        """Begin epoch 0. What is None is that of the joined world, again whenever the items are dealt anew."""
        if drop_last and not pad:
            raise ValueError(
                "`pad` must be True beside drop_last=True, but is False instead. "
                "Use pad=False alone to have every sample once, drop_last=True alone to leave the rest out."
            )
        self._given_world = num_replicas, rank
        self.epoch, self.seed, self.drop_last, self.pad = 0, seed, drop_last, pad
        self._deal(0)

    def _deal(self, position: int) -> None:
        """Begin a pass at `position` in the global sequence."""
        self.num_replicas, self.rank = place_of(*self._given_world)
        self._position, self._drawn, self._consumed = position, 0, 0
        left = self._length() - position
        rounds, rest = divmod(left, self.num_replicas)
        if self.drop_last:
            self.total_size = rounds * self.num_replicas
        elif self.pad:
            self.total_size = (rounds + (rest > 0)) * self.num_replicas
        else:
            self.total_size = left
        self.num_samples = len(self._places())

    def _places(self) -> range:
        """Return where this rank's items stand; those behind the sequence are its first ones again."""
        return range(self._position + self.rank, self._position + self.total_size, self.num_replicas)

    def __len__(self) -> int:
        return self.num_samples

    def __iter__(self) -> Iterator[T_co]:
        """Return this rank's items from the position on.

        Raises RuntimeError when some were consumed since the pass began: `set_epoch` begins the next.
        """
        if self._consumed:
            raise RuntimeError(
                f"`set_epoch` must be called before each pass, but {self._consumed} samples of this one are consumed "
                "already. To go on in the midst of it: sampler.load_state_dict(sampler.state_dict())."
            )
        return self._draw(self._sequence(), self._places())

    def _draw(self, sequence: Sequence[T_co], places: range) -> Iterator[T_co]:
        for drawn, place in enumerate(places, 1):
            self._drawn = max(self._drawn, drawn)
            yield sequence[place % len(sequence)]

    def set_epoch(self, epoch: int) -> None:
        """Begin a pass over `epoch`, from its first item, or where `load_state_dict` has put it in this very epoch."""
        resumed = epoch == self.epoch and not self._consumed
        self.epoch = epoch
        self._deal(self._position if resumed else 0)

    def advance(self, num_samples: int) -> None:
        """Note that this rank has consumed its next `num_samples` samples, and every other rank as many.

        num_samples: of this rank alone, so `len(batch)`, the shorter last batch included; 1 for a batch when a batch
        sampler is wrapped. Local. Raises ValueError when it is more than was drawn and not yet counted.
        """
        uncounted = self._drawn - self._consumed
        if not 0 <= num_samples <= uncounted:
            raise ValueError(
                f"`num_samples` must be at most the {uncounted} samples that rank {self.rank} has drawn and not yet "
                f"counted, but is {num_samples} instead. Count the samples of this rank alone, each batch once."
            )
        self._consumed += num_samples

    @property
    def num_consumed(self) -> int:
        """How many items of this epoch all ranks together have consumed; those that are dropped count at the end."""
        if self.drop_last and self._consumed == self.num_samples:
            return self._length()
        return min(self._position + self._consumed * self.num_replicas, self._length())

    def state_dict(self) -> dict[str, Any]:
        """Return the place in the global sequence, for any size of the world. Local.

        Keep that of rank 0: it is among the last to have samples, so that its last state is the end of the epoch.
        Raises RuntimeError when all samples were drawn and none counted: it would tell of an epoch not begun.
        """
        if self._drawn == self.num_samples > 0 and not self._consumed:
            raise RuntimeError(
                f"`advance` must be called after each batch, but none of the {self._drawn} samples that were drawn is "
                "counted. Call sampler.advance(len(batch)) in the loop."
            )
        return {
            "epoch": self.epoch,
            "seed": self.seed,
            "num_consumed": self.num_consumed,
            "length": self._length(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go to where `state_dict` was taken, with its seed and the ranks of now: nothing comes twice or never.

        Call it on every rank, with the state of rank 0. Raises ValueError when the sequence had another length.
        """
        self.epoch, self.seed = state_dict["epoch"], state_dict["seed"]
        if self._length() != state_dict["length"]:
            raise ValueError(
                f"`state_dict` must be of a sampler of {self._length()} items, but has {state_dict['length']} instead. "
                "Resume with the same data, or begin at the next epoch: set_epoch(state_dict['epoch'] + 1)."
            )
        self._deal(state_dict["num_consumed"])

    def reset(self) -> None:
        """Deal out what is left to the ranks of now, as `elastic.TorchState` asks for in a new world."""
        self._deal(self.num_consumed)
