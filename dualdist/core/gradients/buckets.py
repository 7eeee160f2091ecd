"""Buckets: which gradients are sent together, and their memory.

In this file: TrackedParameter, Bucket and `lay_out` (which gradients share a bucket), and BucketMemory (a flat tensor
in which gradients are summed, and views of it that become the gradients).

A script may put any memory anywhere between two calls, so no tensor that it can reach is trusted to be where it was. A
gradient lies in its slot if it has the slot's address and strides. Views are handed out as new tensors. The number of
tensors that use the storage shows whether the script still has one that is no longer a gradient.
"""

from __future__ import annotations

import sys
import weakref
from collections import defaultdict
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from .. import extension
from ..collectives.reduction import scale_


def as_real(tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor`, with complex numbers as (real, imaginary) pairs in a new last dimension; a view if possible."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


class TrackedParameter:
    """One parameter, and what its gradient must be like."""

    def __init__(self, name: str, tensor: torch.Tensor) -> None:
        self.name = name
        self.tensor = tensor
        self.hooks: list[RemovableHandle] = []
        self._unswappable = weakref.ref(tensor)
        """torch.utils.swap_tensors would take the hook away. It raises for a tensor with a weak reference."""
        self.record_placement()

    def record_placement(self) -> None:
        """Record the current shape, strides, dtype and device as the expected ones, on which the ranks agree."""
        tensor = self.tensor
        self.shape, self.device = tensor.shape, tensor.device
        self.dtype: torch.dtype = getattr(tensor, "grad_dtype", None) or tensor.dtype
        """Of the gradient. Newer releases of torch allow another one than the parameter's."""
        self.is_on_cpu = self.device.type == "cpu"
        streams = None if self.is_on_cpu else extension("streams")
        self.streams = streams and streams.stream_order(self.device)
        dtype = torch.uint8 if tensor.is_quantized else self.dtype  # those have no gradient
        self.like = as_real(torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device="meta"))
        """A gradient without memory, with complex numbers as pairs."""

    def moved(self) -> str:
        """Return how shape, dtype or device differ from the expected ones; '' when they do not."""
        tensor = self.tensor
        dtype = getattr(tensor, "grad_dtype", None) or tensor.dtype
        if tensor.shape != self.shape:
            return f"{self.name!r} changed its shape from {tuple(self.shape)} to {tuple(tensor.shape)}"
        if dtype is not self.dtype or tensor.device != self.device:
            return f"{self.name!r} changed from {self.dtype} on {self.device} to {dtype} on {tensor.device}"
        return ""

    def release(self) -> None:
        """Remove the hook, and replace the parameter by a tensor of the same shape without memory."""
        for hook in self.hooks:
            hook.remove()
        old = self.tensor
        self.tensor = without_memory(old.shape, old.stride(), old.dtype, old.device)


Params = Sequence[TrackedParameter]
Grads = Sequence[torch.Tensor | None]
"""The gradients of some parameters."""


def without_memory(shape: Any, stride: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a tensor that has these, but no memory."""
    tensor = torch.empty_strided(shape, stride, dtype=dtype, device=device)
    tensor.untyped_storage().resize_(0)
    return tensor


def fit(params: Params, grads: Grads) -> bool:
    """Return whether all gradients that are there have the shape, dtype and device that their parameters expect."""
    return all(
        [
            grad.dtype is param.dtype
            and grad.shape == param.shape
            # Comparing devices takes three times as long as `is_cpu`.
            and (grad.is_cpu if param.is_on_cpu else grad.device == param.device)
            for param, grad in zip(params, grads, strict=True)
            if grad is not None
        ]
    )


def has_numbers(grad: torch.Tensor | None) -> bool:
    """Return whether a gradient has an element other than 0. The host waits for a device."""
    return grad is not None and bool((grad.coalesce().values() if grad.is_sparse else grad).count_nonzero())


# The layout in which gradients are sent: flat buckets, each of one dtype and device.

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""Of gradients, with complex numbers as pairs. Frozen parameters of other dtypes, such as quantized ones, have none."""
FIRST_BUCKET_BYTES = 1 << 20
BUCKET_BYTES = 25 << 20
"""DDP's sizes (torch/nn/parallel/distributed.py): a small first bucket starts the network early in backward."""
CPU_BUCKET_BYTES = 8 << 20
"""Size of the others on a CPU. They are scaled in the cache, and between hosts more of their transfer is hidden."""
LAST_BUCKET_BYTES = 1 << 20
"""Target size of the last bucket. It is sent when backward has ended: no computation hides its transfer."""


@dataclass(frozen=True)
class GradientSlot:
    """The place of one parameter's gradient in its bucket, in elements."""

    param: int
    start: int
    shape: torch.Size
    stride: tuple[int, ...]

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the gradient in `flat`, in the parameter's own memory layout; see `as_real` for complex numbers."""
        return flat.as_strided(self.shape, self.stride, flat.storage_offset() + self.start)


@dataclass(frozen=True)
class Bucket:
    """Some parameters whose gradients are sent together."""

    slots: tuple[GradientSlot, ...]
    params: tuple[TrackedParameter, ...]
    """The parameter of each slot."""
    numel: int
    dtype: torch.dtype
    device: torch.device

    @property
    def length(self) -> int:
        """Return the number of elements that are sent. It is at least 1, because not every backend sends none."""
        return max(1, self.numel)

    @property
    def nbytes(self) -> int:
        """Return the number of bytes that are sent."""
        return self.length * self.dtype.itemsize


def lay_out(
    params: Params,
    sparse: Set[int],
    groups: Sequence[Sequence[int]] | None,
    cap_mb: float | None = None,
    order: Sequence[int] = (),
    *,
    as_ddp: bool = False,
) -> list[Bucket]:
    """Return buckets for `params` in the order in which backward is expected to complete them.

    As in DDP (compute_bucket_assignment_by_size in torch/csrc/distributed/c10d/reducer.cpp), the bucket whose last
    gradient arrives first is the first one, so that one of a few late gradients delays none of another dtype.

    Args:
        sparse: indices of parameters whose gradients are sparse. A bucket has a slot without elements for each.
        groups: indices of parameters that must share a bucket; each other parameter has its own bucket.
        cap_mb: size of a bucket in MiB; the first bucket, and usually the last, are smaller. None: 25, on a CPU 8.
        order: in which gradients arrive, as indices of all parameters. (): the last parameter first.
        as_ddp: with DDP's sizes also on a CPU, and a large last bucket is not split. `groups` are never split.
    """
    order = order or range(len(params))[::-1]
    arrival = {index: place for place, index in enumerate(order)}
    parts: list[list[int]] = []
    if groups is not None:
        grouped = {index for group in groups for index in group}
        for whole in [*groups, *([index] for index in order if index not in grouped)]:
            parts += _by_dtype_and_device(params, sorted(whole, key=arrival.__getitem__))
    else:
        for same in _by_dtype_and_device(params, order):
            on_cpu = params[same[0]].is_on_cpu and not as_ddp
            default = CPU_BUCKET_BYTES if on_cpu else BUCKET_BYTES
            parts += _by_size(params, same, default if cap_mb is None else int(cap_mb * 2**20))
            if not as_ddp:
                parts[-1:] = _split_at_end(params, parts[-1])
    return [_bucket(params, part, sparse) for part in sorted(parts, key=lambda part: arrival[part[-1]])]


def _by_size(params: Params, members: Sequence[int], cap: int) -> list[list[int]]:
    """Return `members`, in their order, in parts of about `cap` bytes; the first one is smaller."""
    parts: list[list[int]] = [[]]
    size, limit = 0, min(cap, FIRST_BUCKET_BYTES)
    for index in members:
        if parts[-1] and size >= limit:
            parts.append([])
            size, limit = 0, cap
        parts[-1].append(index)
        size += params[index].like.nbytes
    return parts


def _split_at_end(params: Params, members: list[int]) -> list[list[int]]:
    """Split off the last parameters: one, or those with at most LAST_BUCKET_BYTES.

    Do not split if the first part would have less than three times LAST_BUCKET_BYTES.
    """
    split, late = len(members) - 1, params[members[-1]].like.nbytes
    while split and late + (more := params[members[split - 1]].like.nbytes) <= LAST_BUCKET_BYTES:
        split, late = split - 1, late + more
    early = sum(params[index].like.nbytes for index in members[:split])
    return [members] if early < 3 * LAST_BUCKET_BYTES else [members[:split], members[split:]]


def _by_dtype_and_device(params: Params, order: Sequence[int]) -> list[list[int]]:
    members: dict[tuple[torch.dtype, torch.device], list[int]] = defaultdict(list)
    for index in order:
        dtype = params[index].like.dtype
        if dtype in _DTYPES:
            members[dtype, params[index].device].append(index)
    return list(members.values())


def _bucket(params: Params, members: Sequence[int], sparse: Set[int]) -> Bucket:
    slots, start = [], 0
    for index in members:
        like, dtype = params[index].like, params[index].dtype
        if index in sparse:
            like = as_real(torch.empty(0, dtype=dtype, device="meta"))
        elif not _is_dense(like):
            like = torch.empty(like.shape, device="meta")
        if dtype.is_complex:
            start += start % 2  # complex numbers must begin at an even element
        slots.append(GradientSlot(index, start, like.shape, like.stride()))
        start += like.numel()
    own = tuple(params[index] for index in members)
    return Bucket(tuple(slots), own, start, own[0].like.dtype, own[0].device)


def _is_dense(tensor: torch.Tensor) -> bool:
    """Return whether the elements of `tensor` fill one block of memory without gaps or overlaps."""
    expected = 1
    for size, stride in sorted(zip(tensor.shape, tensor.stride(), strict=True), key=lambda pair: pair[1]):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


# What a rank contributes to a gradient: its kind, a byte.

DENSE, SPARSE, NEW, LEFT_OUT, FINAL = 1, 2, 4, 8, 16
"""The parts of a kind: a dense or sparse gradient, whether it is new since gradients were combined, and if no backward
has reached the parameter since, whether the script may still set it before `step()` (LEFT_OUT) or not (FINAL).
Gradients are combined if some rank has one, and it is new on some rank."""
NOTHING = 0


# The memory of a bucket.

LARGE_BYTES = 1 << 16
"""Mean gradient size in bytes above which a CPU scales faster during the copy than in the cache afterwards.

A GPU copies all gradients in a few launches, and needs one for each if it scales during the copy.
"""


_data_ptr: Any = torch.Tensor.data_ptr


def addresses_of(grads: Grads) -> list[int | None]:
    """Return where gradients lie; None for those that have no memory of their own."""
    try:
        return list(map(_data_ptr, grads))  # takes half of the time
    except (TypeError, RuntimeError):
        return [None if grad is None or grad.is_sparse else grad.data_ptr() for grad in grads]


class BucketMemory:
    """The memory of one bucket. All lists with one item per parameter are in the order of the bucket's slots.

    Its methods are called while autograd records nothing.
    """

    def __init__(self, bucket: Bucket, flat: torch.Tensor, factor: float) -> None:
        """flat: zeros, ((bucket.length,), bucket.dtype). factor: what `pack` multiplies gradients by."""
        self.params = params = bucket.params
        self.flat, self.factor = flat, factor
        self._places = {slot.param: place for place, slot in enumerate(bucket.slots)}
        self._indices = frozenset(self._places)
        self._tensors = [param.tensor for param in params]
        self._all_dense = bytes([DENSE | NEW]) * len(params)
        self._views = [slot.view(self.flat).data for slot in bucket.slots]
        self._gradients = [
            torch.view_as_complex(view) if param.dtype.is_complex else view
            for param, view in zip(params, self._views, strict=True)
        ]
        """What is handed out as new tensors; complex numbers are pairs in `_views`."""
        self._addresses = [view.data_ptr() if view.numel() else -1 for view in self._views]
        self._slots = frozenset(self._addresses)
        self._start = flat.data_ptr()
        self._there: Sequence[int] = ()
        """The places of the gradients that lay in their slots when `can_take` looked."""
        self._is_plain = False
        """Whether all gradients were there then, and dense."""
        self._kept: Set[int] = frozenset()
        """Places whose `.grad` existed before backward: the script may refer to it, so results are copied into it."""
        self._saved: dict[int, torch.Tensor] = {}
        """Copies of gradients that lay in their slots and may have to stay as they were, by place."""
        self._are_set = False
        """Whether `set_early` has made all of them the gradients, and nothing can have changed since."""
        self._has_pairs = any(param.dtype.is_complex for param in params)
        self._uses = self._count_uses()
        self.host: torch.Tensor | None = None
        """Memory of the host for what is sent of this memory, see devices/through_host.py."""

    def _count_uses(self) -> int:
        """Return how many tensors use this storage and how many references there are to it in Python."""
        storage = self.flat.untyped_storage()
        return int(torch._C._storage_Use_Count(storage._cdata)) + sys.getrefcount(storage)

    def is_in_place(self) -> bool:
        """Return whether the memory lies where it was: a script may have resized its storage."""
        return bool(self.flat.data_ptr() == self._start)

    def slots_of(self, grads: Grads, found: Sequence[int | None]) -> list[int]:
        """Return the places of the gradients that lie in their slots. found: the addresses of `grads`."""
        if self._slots.isdisjoint(found):  # as after zero_grad()
            return []
        there = [place for place, (own, slot) in enumerate(zip(found, self._addresses, strict=True)) if own == slot]
        return [place for place in there if self._gradients[place].stride() == grads[place].stride()]  # type: ignore[union-attr]

    def can_take(self, grads: Grads, is_new: Sequence[bool] | None, *, in_place: bool) -> bool:
        """Return whether nobody else needs what is in this memory, when `grads` are sent in it: `pack` follows.

        Somebody does if a tensor uses it that is no gradient in its slot: an earlier gradient, a view, or the gradient
        of another parameter; or if a gradient lies here that is not sent. A script may also have resized the storage.

        Args:
            is_new: whether each one is a contribution; one that is not may have to stay as it is. None: all are.
            in_place: whether gradients may change here while they are sent.
        """
        found = addresses_of(grads)
        self._there, self._is_plain = self.slots_of(grads, found), None not in found
        if self._there and (not in_place or (is_new and not all([is_new[place] for place in self._there]))):
            return False
        if not self.is_in_place() or self._count_uses() > self._uses + len(self._there):
            return False
        return self._is_plain or not any(
            grad is None and self.holds(param) for grad, param in zip(grads, self.params, strict=True)
        )

    def take_gradients(self, indices: Set[int]) -> None:
        """Move the dense gradients of some parameters here before `pack`; their values remain.

        indices: of parameters, also others than those of this bucket. Only gradients of the expected shape, dtype and
        device move.
        """
        moving: list[tuple[torch.Tensor, Any, torch.Tensor]] = []
        for place in (self._places[index] for index in self._indices & indices):
            param, tensor = self.params[place], self._tensors[place]
            grad = tensor.grad
            if grad is not None and not grad.is_sparse and fit([param], [grad]):
                moving.append((tensor, grad, self._gradients[place]))
        if moving:
            torch._foreach_copy_([view for _, _, view in moving], [grad for _, grad, _ in moving])
        for tensor, _, view in moving:
            tensor.grad = view.data

    def pack(
        self, grads: Grads, is_new: Sequence[bool] | None, unreached: Sequence[int] | None, given: Set[int]
    ) -> bytes:
        """Write what this rank sends; return the kind of contribution to each gradient, see Contributions.

        Args:
            grads: `can_take` has returned True for them. Zeros are written for a gradient that is None or sparse.
            is_new: whether each gradient counts as new, also one that is None. None: all that are there do.
            unreached: LEFT_OUT or FINAL for each one that has this part, 0 for others. None: none has.
            given: parameters, by index, whose gradients the script may know.
        """
        self._are_set = False
        self._kept = {self._places[index] for index in self._indices & given}
        there = set(self._there)
        self._saved = {place: self._views[place].clone() for place in there if unreached and unreached[place]}
        targets: list[torch.Tensor] = self._views
        sources: list[Any] = list(grads)
        if there or self._has_pairs or not self._is_plain:
            targets, sources = [], []
            for place, (grad, view) in enumerate(zip(grads, self._views, strict=True)):
                if grad is None or grad.is_sparse:
                    view.zero_()
                elif place not in there:
                    targets.append(view)
                    sources.append(as_real(grad) if self._has_pairs else grad)
        if self.factor != 1.0 and self.flat.is_cpu and self.flat.nbytes > LARGE_BYTES * len(self._views):
            number = torch.tensor(self.factor, dtype=torch.float64, device="cpu")
            for target, source in zip(targets, sources, strict=True):
                torch.mul(source, number, out=target)
            for place in there:
                self._views[place].mul_(number)
        else:
            if targets:
                torch._foreach_copy_(targets, sources)
            scale_(self.flat, self.factor)
        if unreached is None and len(targets) + len(there) == len(grads) and (is_new is None or all(is_new)):
            return self._all_dense
        is_new = [grad is not None for grad in grads] if is_new is None else is_new
        return bytes(
            (NOTHING if grad is None else SPARSE if grad.is_sparse else DENSE) | new * NEW | part
            for new, part, grad in zip(is_new, unreached or [0] * len(grads), grads, strict=True)
        )

    def fill(self, combined: torch.Tensor) -> None:
        """Copy what the ranks have combined, (n,) of any dtype and device, unless it is this memory."""
        if combined.data_ptr() != self.flat.data_ptr() or combined.dtype != self.flat.dtype:
            self.flat.copy_(combined)

    def set_early(self, kinds: bytes, *, at_end: bool) -> None:
        """Make views of this memory the gradients while the data is being sent, where backward has made `.grad`.

        at_end: whether no line of the script runs before `set_gradients`.

        A gradient that the script may know stays. Sparse ones stay, too, because a search for the numbers that are not
        zero writes beyond its result if these change meanwhile (nonzero_out_cpu in torch).
        """
        pairs: Iterable[tuple[torch.Tensor, Any]] = zip(self._tensors, self._gradients, strict=True)
        are_all = kinds == self._all_dense and not self._kept
        if not are_all:
            pairs = [
                pair
                for place, (pair, kind) in enumerate(zip(pairs, kinds, strict=True))
                if kind == DENSE | NEW and place not in self._kept
            ]
        for tensor, view in pairs:
            tensor.grad = view.data
        self._are_set = at_end and are_all

    def set_gradients(self, kinds: bytes) -> None:
        """Make the combined numbers the gradients of those parameters whose kind has no SPARSE.

        They are written into the tensor of before backward: a script may hold it. The kind NOTHING becomes what it was.
        """
        for place, saved in self._saved.items():
            if kinds[place] == NOTHING:
                self._views[place].copy_(saved)
        self._saved = {}
        if self._are_set and kinds == self._all_dense:
            return
        grads = [tensor.grad for tensor in self._tensors]
        found = addresses_of(grads)
        if found == self._addresses:
            return
        there = set(self.slots_of(grads, found))
        written: list[tuple[torch.Tensor, torch.Tensor]] = []
        for place, (tensor, view, kind) in enumerate(zip(self._tensors, self._gradients, kinds, strict=True)):
            if kind != DENSE | NEW or place in there:
                continue
            grad = grads[place]
            if grad is not None and grad.is_sparse:  # sparse_as_dense
                tensor.grad = view.to_sparse(grad.sparse_dim())
            elif grad is None or place not in self._kept:
                tensor.grad = view.data
            else:
                # torch writes a list of tensors at once only if it does not conjugate them when they are read.
                written.append((grad.conj(), view.conj()) if grad.is_conj() else (grad, view))
        if written:
            torch._foreach_copy_([grad for grad, _ in written], [view for _, view in written])

    def contributed(self, kinds: bytes) -> Iterable[int]:
        """Return the parameters, by index, to whose gradients some rank has contributed."""
        if kinds == self._all_dense:
            return self._indices
        return [index for index, kind in zip(self._places, kinds, strict=True) if kind]

    def dense_parts(self, kinds: bytes) -> dict[int, torch.Tensor | None]:
        """Return, for each parameter with sparse gradients, the combined dense ones, None if no rank has one."""
        return {
            index: combined if kind & DENSE else None
            for index, combined, kind in zip(self._places, self._gradients, kinds, strict=True)
            if kind & SPARSE
        }

    @property
    def is_kept(self) -> bool:
        """Whether gradients that the script may know lay here when `pack` was called."""
        return not self._kept.isdisjoint(self._there)

    def held(self) -> list[int]:
        """Return the parameters, by index, whose gradients lie in this memory."""
        return [index for index, place in self._places.items() if self.holds(self.params[place])]

    def holds(self, param: TrackedParameter) -> bool:
        """Return whether the gradient of `param` lies in this memory."""
        grad = param.tensor.grad
        if grad is None or grad.is_sparse:
            return False
        return grad.untyped_storage().data_ptr() == self.flat.untyped_storage().data_ptr()
