"""Which samples each rank gets: from torch's sampler with exact evaluation and resume, another sampler, or an iterable.

One global sequence is sharded in turns: of its remaining items, rank r gets every `num_replicas`-th item, starting at
the r-th. So with equal global batch sizes, step k consists of the same samples in a world of any size. One number, the
offset in the sequence, is enough to resume, also in a world of another size.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import random
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from typing import Any, TypeVar, cast

import numpy as np
import torch

from .core import extension
from .core.checks import flag, instance, integer, mapping, wrong
from .core.lifecycle import rank as own_rank
from .core.lifecycle import size
from .core.world import ProcessSetLike, checked_process_set, global_process_set

__all__ = ("DealingSampler", "DistributedSampler", "DistributedSamplerWrapper", "split_by_rank")

# Sharding one global sequence over the ranks, from an offset that is valid in a world of any size.
#
# A DataLoader with workers draws batches from its sampler before they are trained on. So the number of drawn samples is
# not the offset: the training loop must report the consumed samples with `advance`. The sampler raises an error where
# it can detect that the loop forgets this, or counts other samples than those of this rank.

T_co = TypeVar("T_co", covariant=True)


def checked_epoch(epoch: Any, name: str = "epoch") -> int:
    """Return the argument `epoch` as an int. Raises TypeError or ValueError."""
    return integer(name, epoch, least=0, below=1 << 32)


def checked_seed(seed: Any, name: str = "seed") -> int:
    """Return the argument `seed` as an int. torch accepts its sum with an epoch. Raises TypeError or ValueError."""
    return integer(name, seed, least=-(1 << 63), below=(1 << 64) - (1 << 32))


def given_or_joined_world(
    num_replicas: int | None, rank: int | None, process_set: ProcessSetLike = global_process_set
) -> tuple[int, int]:
    """Return the number of ranks and this process's rank: the arguments, or where they are None, the joined world's.

    process_set: the ranks to use instead of the whole world.
    """
    if process_set is not global_process_set:
        if num_replicas is not None or rank is not None:
            raise ValueError(
                "`num_replicas` and `rank` must be None with `process_set`, but are not. Pass one or the other."
            )
        groups = extension("torch_groups")  # whose ranks need no process set here
        ranks = groups and groups.ranks_of(process_set)
        ranks = sorted(ranks or checked_process_set(process_set, registered=True).ranks or [])
        if own_rank() not in ranks:
            raise ValueError(f"`process_set` must have this rank, {own_rank()}, but has {ranks}.")
        return len(ranks), ranks.index(own_rank())
    num_replicas = size() if num_replicas is None else integer("num_replicas", num_replicas, least=1)
    rank = own_rank() if rank is None else integer("rank", rank)
    if not 0 <= rank < num_replicas:
        raise ValueError(
            f"`rank` must be at least 0 and less than num_replicas={num_replicas}, but is {rank} instead. "
            "Pass hvd.rank() and hvd.size(), or neither."
        )
    return num_replicas, rank


class _Draws(itertools.chain[Any]):
    """The items of one pass. torchdata's StatefulDataLoader saves the position of an iterator with these methods."""

    def state_dict(self, state_dict: Any = None) -> Any:
        raise RuntimeError(
            "`sampler` must count the drawn samples in a StatefulDataLoader, but this one counts those that the loop "
            "reports. Use torch's DataLoader, or torchdata's StatefulDistributedSampler(data, hvd.size(), hvd.rank())."
        )

    load_state_dict = state_dict


class _Computed:
    """A method as an attribute that classes of scripts may set, because it is a plain one in torch's sampler."""

    def __init__(self, compute: Callable[[Any], int]) -> None:
        self._compute = compute

    def __get__(self, sampler: Any, kind: Any = None) -> Any:
        return self if sampler is None else self._compute(sampler)


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

    torchdata's StatefulDataLoader raises an error with it, because it saves the drawn samples as the position.
    """

    per_rank = False
    """Tells checkpoints to save rank 0's state: it is right for all, also when other ranks have had fewer samples."""
    dataset: Any
    epoch: int
    seed: int
    num_replicas: int
    rank: int
    drop_last: bool
    _order: tuple[str, ...] = ()
    """The attributes besides the seed that the order depends on."""

    @abstractmethod
    def _sequence(self) -> Sequence[T_co]:
        """Return all items of this epoch in order, equal on all ranks. A pass begins with this call."""

    def _length(self) -> int:
        """Return the number of all items of this epoch, by default those of `dataset`."""
        return len(self.dataset)

    def _configure(
        self,
        num_replicas: int | None,
        rank: int | None,
        seed: int,
        drop_last: bool,
        pad: bool,
        process_set: ProcessSetLike = global_process_set,
    ) -> None:
        """Start epoch 0. None: the value of the joined world, read again at each new offset or epoch."""
        drop_last, pad = flag("drop_last", drop_last), flag("pad", pad)
        if drop_last and not pad:
            raise ValueError(
                "`pad` must be True with drop_last=True, but is False instead. "
                "Use only pad=False to have every sample once, or only drop_last=True to leave the rest out."
            )
        self._given_world = num_replicas, rank, process_set
        seed = checked_seed(seed)
        self.epoch, self.seed, self.drop_last, self.pad = 0, seed, drop_last, pad
        self._start_at(0)

    def _start_at(self, offset: int) -> None:
        """Start a pass at `offset` in the global sequence."""
        self.num_replicas, self.rank = given_or_joined_world(*self._given_world)
        self._offset, self._drawn, self._consumed = offset, 0, 0

    @_Computed
    def total_size(self) -> int:
        """The number of items that all ranks together get from the current offset on."""
        remaining = self._length() - self._offset
        if self.drop_last:
            return remaining - remaining % self.num_replicas
        return remaining + -remaining % self.num_replicas if self.pad else remaining

    @_Computed
    def num_samples(self) -> int:
        """The number of items that this rank gets from the current offset on."""
        return len(self._shard())

    def _shard(self) -> range:
        """Return the indices of this rank's items. Indices after its end mean its first items again."""
        return range(self._offset + self.rank, self._offset + self.total_size, self.num_replicas)

    def __len__(self) -> int:
        return int(self.num_samples)

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
        def items() -> Iterator[T_co]:
            for drawn, index in enumerate(shard, 1):
                self._drawn = max(self._drawn, drawn)
                yield sequence[index % len(sequence)]

        return _Draws(items())

    def set_epoch(self, epoch: int) -> None:
        """Start a pass over `epoch`: at its first item, or at the offset that `load_state_dict` set for this epoch."""
        epoch = checked_epoch(epoch)
        resumed = epoch == self.epoch and not self._consumed
        self.epoch = epoch
        self._start_at(self._offset if resumed else 0)

    def advance(self, num_samples: int) -> None:
        """Record that each rank has trained on its next `num_samples` samples.

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
        found = {"epoch": self.epoch, "seed": self.seed, "num_consumed": self.num_consumed, "length": self._length()}
        return found | {name: getattr(self, name) for name in self._order}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume in the current world, with the seed of `state_dict`; no sample is repeated or skipped.

        Call it on every rank, with the state of rank 0. Raises ValueError when the sequence had another length.
        """
        keys = ("epoch", "seed", "num_consumed", "length", *self._order)
        mapping("state_dict", state_dict, *keys, fix="Pass what state_dict() of such a sampler has returned.")
        epoch = checked_epoch(state_dict["epoch"], "state_dict['epoch']")
        seed = checked_seed(state_dict["seed"], "state_dict['seed']")
        length = integer("state_dict['length']", state_dict["length"], least=0)
        consumed = integer("state_dict['num_consumed']", state_dict["num_consumed"], least=0, below=length + 1)
        for name in self._order:
            if state_dict[name] != (own := getattr(self, name)):
                raise ValueError(f"`{name}` must be {state_dict[name]} as in `state_dict`, but is {own} instead.")
        self.epoch, self.seed = epoch, seed
        self._expect(length)
        self._start_at(consumed)

    def _expect(self, length: int) -> None:
        """Raise ValueError if this epoch has another length than the one of which a state is."""
        self._check(length, self._length())

    def _check(self, length: int, found: int) -> None:
        if found != length:
            raise ValueError(
                f"`state_dict` must be of a sampler of {found} items, but has {length} instead. "
                "Resume with the same data, or start at the next epoch: set_epoch(state_dict['epoch'] + 1)."
            )

    def reset(self) -> None:
        """Shard the remaining items over the current ranks. `elastic.TorchState` calls it in a new world."""
        self._start_at(self.num_consumed)


# torch's DistributedSampler, with exact evaluation and resume.


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
        process_set: the ranks that share the samples, such as `mesh["data"]`: the others of the mesh get the same.

    Raises:
        NotInitializedError: num_replicas or rank is None before `init()`.
        ValueError: rank is not below num_replicas, or both drop_last and pad=False are given; this rank is not in
            `process_set`, or num_replicas or rank is given beside it.
    """

    _order = ("shuffle",)

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
        process_set: ProcessSetLike = global_process_set,
    ) -> None:
        self.dataset = cast(
            "torch.utils.data.Dataset[Any]",
            instance("dataset", dataset, Sized, "a dataset with a length", "Use split_by_rank() for others."),
        )
        self.shuffle = flag("shuffle", shuffle)
        self._configure(num_replicas, rank, seed, drop_last, pad, process_set)

    def _sequence(self) -> Sequence[int]:
        if not self.shuffle:
            return range(self._length())
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        order = torch.randperm(self._length(), generator=generator, device="cpu")
        # A memoryview: its items are plain integers, each made when it is read.
        return order.numpy().data


# Iterables and iterable datasets, sharded over the ranks and the workers of their loaders.


def split_by_rank(
    iterable: Iterable[T_co],
    num_replicas: int | None = None,
    rank: int | None = None,
    drop_last: bool = False,
    *,
    process_set: ProcessSetLike = global_process_set,
) -> torch.utils.data.IterableDataset[T_co]:
    """Return this rank's shard of `iterable`, as a dataset. All ranks and workers together get every item once.

    Item i goes to rank i % num_replicas. Every worker reads all of `iterable` and skips the items of others: groups of
    `num_replicas` items go to the workers in turns. Ranks may get different numbers of items: train with `join`, or
    with `drop_last`. Local.

    Args:
        iterable: must yield the same items in the same order on all ranks, in every worker, so not one that divides
            itself among workers. It must not shuffle with the global generators. A new pass starts with
            `iter(iterable)`: a generator has one.
        num_replicas, rank: None: the values of the joined world, read in this call, because workers may not know them.
        drop_last: leave out the last items if there are too few for all ranks and workers, so that all ranks get the
            same number.
        process_set: as in DistributedSampler.

    Raises:
        NotInitializedError: num_replicas or rank is None before `init()`.
        ValueError: rank is not below num_replicas, or as in DistributedSampler; `iterable` is already sharded.
        RuntimeError: in a pass over the dataset, when an earlier one has used up the iterable.
    """
    instance("iterable", iterable, Iterable, "an iterable", "Pass an IterableDataset or a list.")
    _check_unsharded("iterable", iterable)
    place = given_or_joined_world(num_replicas, rank, process_set)
    return _Split(iterable, *place, flag("drop_last", drop_last))


class _Split(torch.utils.data.IterableDataset[T_co]):
    def __init__(self, iterable: Iterable[T_co], num_replicas: int, rank: int, drop_last: bool) -> None:
        self.iterable, self.num_replicas, self.rank, self.drop_last = iterable, num_replicas, rank, drop_last
        self._was_read = False

    def __iter__(self) -> Iterator[T_co]:
        caller = inspect.currentframe()
        while caller := caller and caller.f_back:
            if caller.f_code is _Split.__iter__.__code__:  # another split reads this one through some dataset
                raise _already_sharded("iterable")
        worker = torch.utils.data.get_worker_info()
        num_workers, number = (worker.num_workers, worker.id) if worker else (1, 0)
        index = number * self.num_replicas + self.rank
        round_size = num_workers * self.num_replicas
        items = _new_pass("iterable", self.iterable, self._was_read)
        self._was_read = True
        if not self.drop_last:
            yield from itertools.islice(items, index, None, round_size)
            return
        kept: Any = None
        for count, item in enumerate(items):
            if count % round_size == index:
                kept = item
            if (count + 1) % round_size == 0:
                yield cast("T_co", kept)


def _new_pass(name: str, iterable: Iterable[T_co], was_read: bool) -> Iterator[T_co]:
    """Return the items of the argument `name` from the first one on. Raises RuntimeError if they are used up."""
    items = iter(iterable)
    is_over = getattr(items, "gi_frame", items) is None  # a generator that has ended
    if was_read and items is iterable and not is_over:
        # Only an iterator written in Python may start again, in its `__iter__`.
        is_over = not (hasattr(type(items).__iter__, "__code__") and any(True for _ in items))
        items = iter(iterable)
    if is_over:
        fix = "Pass a list, or an object whose __iter__ starts again."
        raise wrong(name, "an iterable that starts again in each pass", iterable, fix, RuntimeError)
    return items


def _check_unsharded(name: str, value: Any) -> None:
    """Raise ValueError if the argument `name`, or a sampler, a dataset or a loader in it, is sharded already."""
    sharded = (torch.utils.data.DistributedSampler, DealingSampler, _Split)
    if any(isinstance(part, sharded) for part in _parts(value, *_SAMPLERS, "dataset", "iterable")):
        raise _already_sharded(name)


def _already_sharded(name: str) -> ValueError:
    return ValueError(
        f"`{name}` must yield the samples of all ranks, but is already sharded over the ranks. Pass what is inside it."
    )


# Any sampler or batch sampler, sharded over the ranks.

_SAMPLERS = ("sampler", "batch_sampler")
"""Attributes of samplers and loaders that are samplers."""


class DistributedSamplerWrapper(DealingSampler[T_co]):
    """Shards the items of another sampler over the ranks: of a weighted sampler, a batch sampler, or your own.

    Catalyst and Lightning have a class of the same name and purpose. Whenever a pass begins, all ranks draw its whole
    sequence, with equal results: only meanwhile, its `generator` and the global ones of torch, numpy and random are
    seeded by `seed` and epoch. With a generator that is not torch's, it must itself draw the same items on all ranks.
    Its `set_epoch` and that of a sampler in it are called by `set_epoch` and `load_state_dict`.

    Weights, indices or a size that change have an effect from the next pass on. An epoch that is resumed has the
    remaining items only if the sampler draws as it did before: if it then draws another number, that pass raises
    ValueError. Before a pass, `len()` is the sampler's own; a sampler without one draws for it.

    Args:
        sampler: yields indices, or lists of them for `DataLoader(batch_sampler=)`. It must end, and draw from the whole
            dataset: a sampler that is already sharded over the ranks is refused.
        num_replicas, rank, seed, drop_last, pad, process_set: as in DistributedSampler. A batch
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
        process_set: ProcessSetLike = global_process_set,
    ) -> None:
        fix = "Pass a sampler, a batch sampler or a list."
        instance("sampler", sampler, Iterable, "a sampler or another iterable", fix)
        _check_unsharded("sampler", sampler)
        self.sampler, self._was_read = sampler, False
        self._configure(num_replicas, rank, seed, drop_last, pad, process_set)

    def _start_at(self, offset: int) -> None:
        super()._start_at(offset)
        if not offset:
            self._expected: int | None = None
            """The length of the epoch: of the state that was loaded, or as it was drawn last."""
        with _seeded(self.sampler, self.seed + self.epoch):
            for part in _parts(self.sampler, *_SAMPLERS):
                if hasattr(part, "set_epoch"):
                    part.set_epoch(self.epoch)

    def _sequence(self) -> Sequence[T_co]:
        with _seeded(self.sampler, self.seed + self.epoch):
            drawn = list(_new_pass("sampler", self.sampler, self._was_read))
        self._was_read = True
        if self._offset and self._expected is not None:
            self._check(self._expected, len(drawn))
        self._expected = len(drawn)
        return drawn

    def _length(self) -> int:
        if self._expected is None:
            try:
                return len(cast("Sized", self.sampler))
            except (TypeError, NotImplementedError):
                return len(self._sequence())
        return self._expected

    def _expect(self, length: int) -> None:
        # Checked when the pass begins: the sampler's own length may be an estimate.
        self._expected = length


def _parts(whole: Any, *names: str, outer: tuple[Any, ...] = ()) -> Iterator[Any]:
    """Yield a sampler, dataset or loader, and what is in it in attributes of these names, at any depth."""
    yield whole
    outer += (whole,)
    for name in names:
        part = getattr(whole, name, None)
        if part is not None and all(part is not known for known in outer):
            yield from _parts(part, *names, outer=outer)


@contextlib.contextmanager
def _seeded(sampler: Any, seed: int) -> Iterator[None]:
    """Seed all generators in the `with` block, and restore their states after it."""
    parts = _parts(sampler, *_SAMPLERS)
    held = [part for part in parts if isinstance(getattr(part, "generator", part), torch.Generator | None)]
    own = [part.generator for part in held]
    of_python, of_numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):  # the CPU's generator only, as below: manual_seed would also seed GPUs
            for part in held:
                part.generator = torch.Generator().manual_seed(seed)
            random.seed(seed)
            np.random.seed(seed % 2**32)
            torch.default_generator.manual_seed(seed)
            yield
    finally:
        for part, generator in zip(held, own, strict=True):
            part.generator = generator
        random.setstate(of_python)
        np.random.set_state(of_numpy)
