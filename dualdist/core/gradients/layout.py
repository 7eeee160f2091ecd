"""The layout of a reduction: the buckets, what of them has arrived, and which gradients each rank contributes.

Each rank knows on the host which gradients it has. The ranks exchange this only when some rank contributes other
gradients than at the last exchange. A regular step therefore needs no exchange, and the host reads nothing of a GPU.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence, Set
from typing import Any

import torch

from .. import extension
from ..backends.base import Group
from ..types import REDUCE_OP_NAMES, Max
from ..world import channel_of
from .buckets import DENSE, FINAL, LEFT_OUT, NEW, NOTHING, SPARSE, Bucket, BucketMemory, Grads, Params, lay_out
from .combiner import SyncOptions


class ArrivalOrder:
    """Counts the gradients that each bucket still misses. Parameters are given by index."""

    expected: Sequence[int] = ()
    """All parameters, in the order in which the next backward should complete them. Empty: not known."""

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self.bucket_of = {slot.param: place for place, bucket in enumerate(buckets) for slot in bucket.slots}
        self._sizes = [len(bucket.slots) for bucket in buckets]
        self.start_over()

    def start_over(self) -> None:
        """Prepare for the next backward."""
        self._missing = list(self._sizes)

    def mark(self, arrived: Sequence[int]) -> None:
        """Count the gradients that have `arrived`."""
        missing = self._missing
        for place in map(self.bucket_of.__getitem__, arrived):
            missing[place] -= 1

    def take_waiting(self, arrived: Sequence[int], sent: int) -> Mapping[int, Sequence[int]]:
        """Return bucket -> gradients that should move there, after some have `arrived`; not for the first `sent`."""
        return {}

    def is_complete(self, place: int) -> bool:
        """Return whether all gradients of the bucket at `place` have arrived."""
        return place < len(self._missing) and self._missing[place] == 0

    def learn(self, order: Sequence[int]) -> None:
        """Expect that later backwards complete the gradients in this order, if it has all of them once."""


class Contributions:
    """The kinds of contribution to all gradients: those of this rank, and those of all ranks combined.

    Kinds are bytes, one for each gradient, in the order of the buckets. Between two exchanges, the combined kinds are
    those of the last exchange; before the first one, every rank contributes the expected kinds.
    """

    def __init__(self, buckets: Sequence[Bucket], sparse: Set[int]) -> None:
        expected = [
            bytes(NEW | (SPARSE if slot.param in sparse else DENSE) for slot in bucket.slots) for bucket in buckets
        ]
        self._expected = b"".join(expected)
        """What a rank contributes that has all gradients; equal on all ranks."""
        self._ends = list(itertools.accumulate(map(len, expected)))
        self.announced: bytes | None = self._expected
        """What this rank contributed at the last exchange; None after an exchange in which it had joined."""
        self.is_complete = True
        """Whether every member that had not joined contributed the expected kinds at the last exchange."""
        self.combined = list(expected)
        """For each bucket, the kinds that the ranks contribute, without LEFT_OUT and FINAL."""
        self._indices = [slot.param for bucket in buckets for slot in bucket.slots]
        self.left_out: frozenset[int] = frozenset()
        """The parameters that some rank may still set and no backward on any rank has reached."""
        self._any_final = False
        """Whether some rank will not set gradients any more that backward has not reached."""

    def combined_now(self, place: int, *, can_repeat: bool) -> bytes:
        """Return the kinds of what is combined of the bucket at `place`; the rest is combined in `step()`.

        can_repeat: whether gradients that a rank may still set can be combined now, and once more later.
        """
        kinds = self.combined[place]
        if not self.left_out or (can_repeat and not self._any_final):
            return kinds
        start = self._ends[place] - len(kinds)
        indices = self._indices[start : self._ends[place]]
        return bytes(NOTHING if index in self.left_out else kind for index, kind in zip(indices, kinds, strict=True))

    def exchange(self, group: Group, kinds: bytes | None) -> None:
        """Combine the kinds of all members. Collective over `group`. kinds: of this rank; None: it has joined."""
        count = len(self._expected)
        # On the CPU, whatever the device of the gradients.
        own = torch.tensor(list(bytes(count) if kinds is None else kinds), dtype=torch.int32, device="cpu")
        is_incomplete = torch.tensor([kinds not in (None, self._expected)], device="cpu")
        rows = [own & part != 0 for part in (DENSE, SPARSE, NEW, LEFT_OUT, FINAL)]
        sent = torch.cat([*rows, own & (NEW | LEFT_OUT | FINAL) == NEW, is_incomplete]).int()
        group.allreduce_(sent, Max).wait()
        dense, sparse, new, left_out, final, reached = sent[:-1].bool().view(6, count)
        combined = bytes(((dense * DENSE + sparse * SPARSE + NEW) * (new & (dense | sparse))).tolist())
        self.combined = [combined[start:end] for start, end in itertools.pairwise([0, *self._ends])]
        is_left_out = (left_out & ~reached).tolist()
        self.left_out = frozenset(itertools.compress(self._indices, is_left_out))
        self.announced, self._any_final, self.is_complete = kinds, bool(final.any()), not sent[-1]


class Layout:
    """The buckets of some parameters, the order in which their gradients arrive, and what the ranks contribute."""

    def __init__(self, params: Params, options: SyncOptions, sparse: frozenset[int], order: Sequence[int] = ()) -> None:
        """sparse: parameters (by index) that have had a sparse gradient on some rank. order: as for `lay_out`."""
        self.params, self.options, self._sparse = params, options, sparse
        self.buckets = self.buckets_in(order)
        self.is_on_one_device = len({bucket.device for bucket in self.buckets}) == 1
        learning = extension("arrival_order")
        self.order: ArrivalOrder = (ArrivalOrder if learning is None else learning.ArrivalOrder)(self.buckets)
        self.contributions = Contributions(self.buckets, sparse)
        self._current: dict[int, BucketMemory] = {}
        """The memory of each bucket that the current backward uses."""
        self._last: dict[int, BucketMemory] = {}
        """The memory that earlier backwards used."""

    def describe(self) -> tuple[tuple[str, Any], ...]:
        """Return (name, value) pairs that must be equal on all ranks, what gradients are like first."""
        options = self.options
        layout = tuple((p.name, tuple(p.shape), p.like.stride(), str(p.dtype), p.device.type) for p in self.params)
        return (
            ("parameters", layout),
            ("optimizer", options.optimizer),
            ("op", REDUCE_OP_NAMES[options.reduction.op]),
            ("prescale_factor", options.reduction.prescale_factor),
            ("postscale_factor", options.reduction.postscale_factor),
            ("compression", getattr(options.compression, "__name__", type(options.compression).__name__)),
            ("groups", None if options.groups is None else tuple(map(tuple, options.groups))),
            ("bucket_cap_mb", options.bucket_cap_mb),
            ("sparse_as_dense", options.sparse_as_dense),
            ("comm_hook", options.comm_hook and options.comm_hook.name),
        )

    def buckets_in(self, order: Sequence[int]) -> list[Bucket]:
        """Return the buckets if they follow this order of arrival."""
        options = self.options
        as_ddp = options.comm_hook is not None  # each call of a hook costs more than what smaller buckets hide
        # A compressor of the user gets each gradient by itself, in its shape, as from Horovod.
        groups = options.groups if options.only_casts else []
        return lay_out(self.params, self._sparse, groups, options.bucket_cap_mb, order, as_ddp=as_ddp)

    def start_over(self) -> None:
        """Prepare for the next backward."""
        self.order.start_over()
        self._last |= self._current
        self._current = {}

    def memory_of(
        self, place: int, grads: Grads | None = None, is_new: Sequence[bool] | None = None, *, in_place: bool = True
    ) -> BucketMemory:
        """Return the memory of the bucket at `place` for this backward.

        It is that of the last backward, unless the script needs what is there (BucketMemory.can_take).

        Args:
            grads: what is sent in it now. The memory is checked again then, because a hook may have kept a gradient
                that has moved there. None: nothing yet, and other gradients only move there.
            is_new: as for BucketMemory.can_take.
            in_place: whether gradients that are there may be sent from there.
        """
        known = self._current.get(place)
        if grads is None and known is not None and known.is_in_place():
            return known
        known, bucket = known or self._last.pop(place, None), self.buckets[place]
        if grads is None:
            grads = [param.tensor.grad for param in bucket.params]
        if known is None or not known.can_take(grads, is_new, in_place=in_place):
            if bucket.device.type == "cpu" and (keep := extension("keep_freed_memory")) is not None:
                keep()
            group = channel_of(self.options.process_set).gradients
            flat = group.zeros(bucket.length, bucket.dtype, bucket.device)
            factor = 1 / group.size if self.options.divides_first(bucket.dtype, group) else 1.0
            known = BucketMemory(bucket, flat, factor)
        self._current[place] = known
        return known

    def release_memory(self) -> None:
        """Free the buckets' memory."""
        self._current, self._last = {}, {}
