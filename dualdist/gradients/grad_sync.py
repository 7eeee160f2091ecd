"""Gradients of all ranks combined while backward still runs, complete when `backward()` returns.

Hooks on the parameters send each bucket of gradients when it is complete, strictly in order, with views of the bucket
in the gradients' place; a callback at the end of backward sends what is left and waits. One implementation serves both
backends, every style of wrapper, gradient accumulation, parameters that a rank does not use, sparse gradients, and
ranks that have joined.

The order of sending needs no agreement because it is fixed by the layout, which is compared once when the
synchronisation is made. That it takes place is announced on the ordinary line of collectives at the end of backward,
when the data is under way: so a rank that does something else is an error on all ranks, and a rank that has joined
knows that it must take part. Data that is soon there is waited for first, since threads that wake each other for the
announcement would hold it up: the step of a small network took 2 to 8 % longer.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from ..agreement.call import Call
from ..agreement.call_site import call_site
from ..backends.base import Group, Work
from ..collectives.reduce import scale_, sum_sparse
from ..collectives.wire import reduction_dtype
from ..errors import CollectiveMismatchError, HorovodInternalError
from ..types import Average, Sum
from ..world.context import current
from ..world.process_sets import channel_of
from .accumulation import Accumulated
from .announcement import announce
from .bucket_memory import BucketMemory
from .buckets import lay_out
from .options import SyncOptions

__all__ = ("GradSync",)


_QUIET_SECONDS = 0.05
"""How long the data has the machine to itself before its announcement, which may not wait for it for good."""

_alive: weakref.WeakSet[GradSync] = weakref.WeakSet()


class GradSync:
    """Combines the gradients of some parameters over a process set, in every backward that completes them."""

    def __init__(
        self,
        named: Sequence[tuple[str, torch.Tensor]],
        options: SyncOptions,
        owner: Any,
        groups: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """Hook onto the parameters. owner: the optimizer or module for which this works, until that is gone."""
        self.options = options
        self._groups = groups
        self._params: list[Accumulated] = []
        self._sparse: set[int] = set()
        self.enabled = True
        """Whether backward combines; while it does not, gradients accumulate."""
        self._place = -1
        """Its name to the other ranks, while the world knows of it."""
        self._buckets_sent = 0
        """Since then; compared at the end of each backward, since a rank that repeats one alone is ahead for good."""
        self._sent = False
        """Whether gradients were combined since the last step."""
        self._early = False
        """Whether buckets take the gradients' place when they are sent, which saves the memory of the gradients.

        In a first backward it is not known whether one gradient is completed once: see `_begin_again`.
        """
        self._repeats = False
        """Whether a gradient is completed several times, or somebody else combines it as well."""
        weakref.finalize(owner, self.release).atexit = False
        self.add(named)

    def add(self, named: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Take in more parameters. Collective over the process set: the layout is compared between the ranks.

        In an elastic job that waits for the first gradients: a process that comes later makes its optimizer by itself.
        """
        params = [*self._params, *(Accumulated(name, tensor) for name, tensor in named)]
        if not current().launch.elastic:
            self._enter_world(params)
        self._params = params  # not before all agree: others may go on with the old ones
        self._unwatched = [index for index, param in enumerate(params) if param.hook is None]
        self._note_others()
        self.watch()
        self._lay_out()

    def watch(self) -> None:
        """Hook onto the parameters that need gradients by now."""
        still = []
        for index in self._unwatched:
            param = self._params[index]
            if param.tensor.requires_grad:
                hook = functools.partial(self._fire, index)
                param.hook = param.tensor.register_post_accumulate_grad_hook(hook)
            else:
                still.append(index)
        self._unwatched = still

    def _note_others(self) -> None:
        """Find the synchronisations that combine some of these parameters too, each after a copy of the gradient."""
        own = {id(param.tensor) for param in self._params}
        for other in _alive:
            if other is not self and any(id(param.tensor) in own for param in other._params):
                self._repeats = other._repeats = True
                self._early = other._early = False
        _alive.add(self)

    def _lay_out(self) -> None:
        tensors = [param.tensor for param in self._params]
        self._buckets = lay_out(tensors, self._sparse, self._groups, self.options.bucket_cap_mb)
        self._bucket_of = {
            slot.param: place for place, bucket in enumerate(self._buckets) for slot in bucket.slots
        }
        self._memory: dict[int, BucketMemory] = {}
        self._start_over()

    def _start_over(self) -> None:
        self._fired: set[int] = set()
        self._missing = [len(bucket.slots) for bucket in self._buckets]
        self._works: list[tuple[torch.Tensor, Work]] = []
        self._tasks: set[int] = set()
        self._wrong: list[str] = []
        """What has become of parameters that were moved or replaced."""

    def _enter_world(self, params: Sequence[Accumulated]) -> None:
        """Make this synchronisation known to the ranks of the world that is joined now, and compare its layout."""
        options = self.options
        call = Call(options.owner, options.describe(params, self._groups), site=call_site())
        channel_of(options.process_set).run(call, lambda group, verdict: None)
        if self._place < 0:
            known = current().grad_syncs[options.process_set.process_set_id]
            self._place = len(known)
            known.append(self)

    def release(self) -> None:
        """Give the parameters back, their owner is gone; stay able to answer for a rank that has joined."""
        for param in self._params:
            param.forget()
        self._memory = {}

    def forget_world(self) -> None:
        """Be as new to the next world, where others may know nothing of this one."""
        self._place = -1
        self._buckets_sent = 0
        self._sparse = set()
        for param in self._params:
            param.settle()
        self._lay_out()

    # What backward does

    def _fire(self, index: int, _: torch.Tensor) -> None:
        """Take the gradient that backward has just completed for the parameter at `index`."""
        param = self._params[index]
        if self.enabled and self.options.needs_no_count:
            param.passes = 1
        else:
            self._count(param)
            if not self.enabled:
                return
        if index in self._fired:
            self._begin_again(index)
        task = torch._C._current_graph_task_id()
        if task not in self._tasks:  # reentrant checkpoints nest: each task has an end of its own
            self._tasks.add(task)
            torch.autograd.Variable._execution_engine.queue_callback(self._end_of_backward)
        self._fired.add(index)
        if param.passes >= self.options.passes:
            place = self._bucket_of[index]
            self._missing[place] -= 1
            if self._missing[place] == 0:
                self._send_complete()

    def _send_complete(self) -> None:
        while len(self._works) < len(self._buckets) and self._missing[len(self._works)] == 0:
            self._send_next()

    def _count(self, param: Accumulated) -> None:
        """Count one more gradient. Raises AssertionError where adding to a combined one makes it wrong."""
        combined = self._is_combined(param)
        if not (param.accumulated() and combined) or self.options.reduction.op == Average:
            return  # averaging an average again changes nothing
        raise AssertionError(
            f"Gradients were computed more than backward_passes_per_step times before call to step(): {param.name!r} "
            "holds a combined gradient already. Increase backward_passes_per_step to accumulate gradients locally."
        )

    def _end_of_backward(self) -> None:
        if any(self._params[index].passes >= self.options.passes for index in self._fired):
            self.combine()
        self._fired.clear()
        self._tasks.clear()

    def _begin_again(self, index: int) -> None:
        """See through what is under way and start over.

        Either an earlier backward raised before its end, or reentrant checkpoints complete one gradient several times
        in one backward, such as that of a weight they share: then all that came before is sent once more.
        """
        self._repeats = True
        for _, work in self._works:
            work.wait()
        place = self._bucket_of[index]
        was_sent = place < len(self._works) and self._memory[place].holds(self._params[index])
        self._start_over()
        if was_sent:
            raise RuntimeError(
                f"The gradient of {self._params[index].name!r} was completed again after it was sent. "
                "Use checkpoint(..., use_reentrant=False); call zero_grad() before you repeat a backward that failed."
            )

    @contextlib.contextmanager
    def disabled(self) -> Iterator[None]:
        """Let gradients accumulate in the body; the next backward behind it combines all that has come together."""
        before, self.enabled = self.enabled, False
        try:
            yield
        finally:
            self.enabled = before

    def finish(self) -> None:
        """Combine what backward has left over, before a step. Collective when something is left."""
        unseen = any(self._params[index].tensor.grad is not None for index in self._unwatched)
        if not self._sent or unseen or any(param.passes for param in self._params):
            self.combine()
        self.watch()

    def fill(self) -> None:
        """Give parameters that no rank has used zeros, as Horovod does (horovod/torch/optimizer.py:177)."""
        for param in self._params:
            if param.tensor.grad is None and param.tensor.requires_grad:
                param.tensor.grad = torch.zeros_like(param.tensor)

    def stepped(self) -> None:
        """Note that the gradients were used."""
        self._sent = False

    def check_skippable(self) -> None:
        """Skipping a synchronisation is always possible here."""

    def set_passes(self, passes: int) -> None:
        """Set how many backwards accumulate before gradients are combined."""
        self.options = replace(self.options, passes=passes)

    # Sending and receiving

    def combine(self) -> None:
        """Send what is not under way yet, wait for all of it, and put the results into the gradients."""
        try:
            if self._place < 0:
                self._enter_world(self._params)
            while len(self._works) < len(self._buckets):
                self._send_next()
            channel = channel_of(self.options.process_set)
            group = channel.gradients
            if self._works and not channel.has_joined:  # one that has joined waits to be told
                self._works[-1][1].wait_for(_QUIET_SECONDS)
            try:
                wrong = announce(
                    self.options.process_set, self._place, self._buckets_sent, is_wrong=bool(self._wrong)
                )
            except CollectiveMismatchError:
                self._receive(group, keep=False)  # the others see the data through before they raise as well
                raise
            own = self._wrong
            self._receive(group, keep=not wrong)
            self._check_unmoved(own, wrong)
        finally:
            self._start_over()
        self._early = not self._repeats
        counts = not self.options.needs_no_count
        for param in self._params:
            param.passes = 0
            if counts:
                param.note()
        self._sent = True

    def refuse(self, reason: str) -> None:
        """Raise ValueError for `reason`, and let the others' `combine` raise as well. Collective as `combine` is."""
        self._wrong.append(reason)
        self.combine()

    def _check_unmoved(self, own: list[str], wrong: list[int]) -> None:
        """Raise on every rank when parameters were moved on the ranks `wrong`, perhaps `own` ones."""
        if own:
            raise ValueError(
                f"The parameters of {self.options.owner} must stay what they were when it was made, but "
                f"{own[0]}. Move or change the model first, then wrap it."
            )
        if wrong:
            raise HorovodInternalError(
                f"Gradients were not combined: on ranks {wrong}, parameters of {self.options.owner} were moved or "
                "replaced after it was made."
            )

    def contribute_nothing(self) -> None:
        """Take part in the others' `combine` as a rank that has joined."""
        self._start_over()
        while len(self._works) < len(self._buckets):
            self._send_next(empty=True)
        self._receive(channel_of(self.options.process_set).gradients, keep=False)
        self._start_over()

    def _send_next(self, empty: bool = False) -> None:
        if self._place < 0:
            self._enter_world(self._params)
        place = len(self._works)
        bucket, group = self._buckets[place], channel_of(self.options.process_set).gradients
        memory = self._memory_of(place)
        grads = [None if empty else self._contribution(param) for param in memory.params]
        factor = 1 / group.size if self.options.divides_first(bucket.dtype, group) else 1.0
        is_new = [not self._sent or param.passes > 0 for param in memory.params]
        dense = memory.fill(grads, is_new, factor)
        if self._early:
            memory.put(dense)
        wire = self._to_wire(memory.flat, group)
        scale_(wire[: bucket.numel], self.options.reduction.prescale_factor)
        lane = f"{self._place}.{place}"
        work = group.allreduce_(wire, Sum, tag=lane)
        self._buckets_sent += 1
        names = (self._params[slot.param].name for slot in bucket.slots)
        flight = current().timeline.recorded(work, f"gradients.{lane}", names, memory.flat.device.type)
        self._works.append((wire, flight))

    def _memory_of(self, place: int) -> BucketMemory:
        if place in self._memory and self._memory[place].is_held():
            del self._memory[place]
        if place not in self._memory:
            bucket = self._buckets[place]
            self._memory[place] = BucketMemory(bucket, [self._params[slot.param] for slot in bucket.slots])
        return self._memory[place]

    def _is_combined(self, param: Accumulated) -> bool:
        """Return whether the gradient was combined already, and nothing was added to it here since."""
        return self._sent and param.passes == 0

    def _contribution(self, param: Accumulated) -> torch.Tensor | None:
        """Return what this rank sends. A combined gradient goes again into an average, where others add to theirs."""
        if moved := param.moved():
            self._wrong.append(moved)
            return None
        grad = param.tensor.grad
        if grad is None or (self.options.reduction.op != Average and self._is_combined(param)):
            return None
        if self.options.sparse_as_dense and grad.is_sparse:
            return grad.to_dense()
        return grad

    def _to_wire(self, flat: torch.Tensor, group: Group) -> torch.Tensor:
        compressed, _ = self.options.compression.compress(flat)
        dtype = reduction_dtype(compressed.dtype, group)
        return compressed.to(group.wire_device(flat.device), dtype)

    def _receive(self, group: Group, keep: bool) -> None:
        sparse: set[int] = set()
        reduction = self.options.reduction
        for (place, bucket), (wire, work) in zip(enumerate(self._buckets), self._works, strict=True):
            work.wait()
            memory = self._memory[place]
            divides = reduction.op == Average and not self.options.divides_first(bucket.dtype, group)
            scale_(wire[: bucket.numel], reduction.postscale_factor / (group.size if divides else 1))
            if wire.data_ptr() != memory.flat.data_ptr():
                memory.flat.copy_(wire)
            counts = wire[bucket.numel :].tolist()
            is_dense, is_sparse = counts[: len(bucket.slots)], counts[len(bucket.slots) :]
            if any(is_sparse):
                sparse.update(
                    slot.param for slot, count in zip(bucket.slots, is_sparse, strict=True) if count
                )
            if keep:
                memory.put(is_dense)
            else:
                memory.drop()
        for index in sorted(sparse):
            self._combine_sparse(group, index, keep)
        if sparse - self._sparse:
            self._sparse |= sparse
            self._lay_out()

    def _combine_sparse(self, group: Group, index: int, keep: bool) -> None:
        contribution = self._contribution(self._params[index]) if keep else None
        param = self._params[index].tensor
        combined = sum_sparse(group, contribution, param)
        if keep:
            average = self.options.reduction.op == Average
            param.grad = combined / group.size if average else combined
