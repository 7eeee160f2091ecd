"""Sends gradients in buckets while backward runs, and makes the results the gradients, as torch's DDP Reducer does.

The plain step, an average of dense gradients that each rank has:

    buckets = lay_out(params)                    # the ranks compare it once: enter_world

    def on_gradient(param):                      # a hook, when backward has completed a gradient: arrivals.py
        missing[bucket_of[param]] -= 1
        while sent < len(buckets) and missing[sent] == 0:
            send(buckets[sent])                  # in this order on all ranks, so none needs its own agreement

    def send(bucket):                            # _send_next
        memory = memory_of(bucket)               # that of the last step: buckets.py
        for param in bucket:
            memory[param].copy_(param.grad)
        works.append(group.allreduce_(memory))   # it starts, and backward continues
        sent += 1

    def end_of_backward():                       # reduce
        for bucket in buckets[sent:]:
            send(bucket)
        channel.run(announcement)                # all ranks are here, and have sent the same
        for work, memory in works:               # _receive
            work.wait()
            memory /= size
            for param in memory:
                param.grad = memory[param]       # a view
        start_over()                             # missing, sent and works are as at first

What is added to it:

- Gradients that have arrived move to their buckets before these are sent (`mark_ready`). An average may divide before
  the sum (`SyncOptions.divides_first`).
- A gradient that this rank does not have is sent as zeros. The ranks learn from the announcement whether others
  contribute other gradients than before, and only then exchange what they have (`_settle`, Contributions).
- The announcement of the first rank may have another order of arrival (dualdist/arrival_order.py). Then all ranks lay
  out buckets by it for the next backward (`_next_order`).
- A rank that has called `join` learns from the announcement that it must take part (`contribute_nothing`). If a rank
  calls something else, all ranks receive what was sent, and raise an error.
- Backward may fail, or complete a gradient twice: what was sent is received and dropped (`abandon`).
- Sparse gradients have a slot without elements, and are gathered after the buckets (dualdist/sparse_allreduce.py).
- Before the announcement, a rank waits up to 50 ms for its last bucket: otherwise thread wake-ups slow the data down,
  and the step of a small network takes 2 to 8 % longer. On a GPU nothing waits: `Work.wait` orders streams, and the
  host reads no tensor.

What is as at first again (G: in grad_sync.py, A: in arrivals.py), and when:

    _sent, _kinds, changes, is_last,          after a reduction, also if it raises, and after a backward that is given
    what layout.order misses; _newest (G);    up: start_over
    arrived, handled and the tasks (A)
    _counted (G)                              after a reduction, also if it raises, and each backward
    _pass_counts (G), given, _compares_start  after a reduction
    reduced, used                             after a step: GradSync.after_step
    layout, with its memory and order         with new parameters, a hook, a world, another order, or the first sparse
                                              gradient of a parameter: lay_out
    _order, _next                             with new parameters, a hook, or a world
    is_known, _members, _buckets_sent,        in a new world: forget_world
    _sparse, left_out

`given` has all parameters, and is narrowed at the first gradient of each backward. `left_out` is that of the last
reduction, and within a step only shrinks. Each reduction decides on `sets_early`, each backward on `_is_shared` (G).
`_repeats`, `_has_observed` and `_overlaps` (G) never go back.
"""

from __future__ import annotations

import contextlib
import functools
from array import array
from collections import defaultdict
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from ...errors import CollectiveMismatchError, HorovodInternalError
from .. import extension, needed
from ..agreement.call import Call, Data, Kind, call_site, no_data
from ..agreement.channel import Channel
from ..agreement.connections import Verdict
from ..agreement.guard import OutOfStepError, in_turn
from ..backends.base import CombinedWork, FailedWork, Group, Work
from ..collectives.join import after_join
from ..collectives.reduction import scale_, wire_dtype
from ..launch import is_on
from ..types import Average, Sum
from ..world import ProcessSet, channel_of, current, global_process_set
from .buckets import FINAL, LEFT_OUT, SPARSE, Bucket, BucketMemory, TrackedParameter, fit, has_numbers
from .combiner import SyncOptions
from .layout import Layout

_DATA_FIRST_SECONDS = 0.05
"""How long the announcement waits for the data at most."""

# What combines gradients in the joined world. A rank that has called `join` finds there what must take part.

_members: dict[int | None, list[Any]] = defaultdict(list)
"""The `member` of each Reducer of a process set, by its ID. Their order is the same on all ranks."""


def members_of(process_set: ProcessSet) -> list[Any]:
    """Return those of the joined world, to be changed. They are forgotten when this rank leaves the world."""
    if not _members:
        current().at_leave.callback(_forget_world)
    return _members[process_set.process_set_id]


def _forget_world() -> None:
    with contextlib.ExitStack() as stack:  # which calls all, even if one raises
        for member in [member for known in _members.values() for member in known]:
            stack.callback(member.forget_world)
        _members.clear()


@after_join.append
def _compare_starts() -> None:
    for member in _members.get(global_process_set.process_set_id, ()):
        member.compare_start()


def _compares_starts() -> bool:
    return is_on(current().settings.env, "DUALDIST_COMPARE_START", True)


def _contribute_nothing(call: Call, group: Group, verdict: Verdict) -> None:
    arguments = dict(call.arguments)
    _members[arguments["process_set"]][arguments["grad_sync"]].contribute_nothing(group, verdict)


# GRADIENTS ends each backward pass. SYNCHRONIZE asks in step() whether some rank has set a gradient that no backward
# has reached.
GRADIENTS = Kind("gradient synchronization", "ALLREDUCE", Data.BEFORE, _contribute_nothing, in_step=True)
SYNCHRONIZE = Kind("synchronize", "SYNCHRONIZE", Data.NONE, no_data, in_step=True)


@dataclass(slots=True)
class SentBucket:
    """A bucket that was sent: an allreduce sums it, or a communication hook of the user combines it."""

    memory: BucketMemory
    work: Work
    """Ends when its data has been combined."""
    combined: Callable[[float], torch.Tensor | Exception]
    """Called after `work`, with what a sum is multiplied by. Returns the combined gradients, or what a hook raised."""


class Reducer:
    """Reduces the gradients of some parameters over a process set.

    GradSync calls `mark_ready` for each gradient that backward completes, and `reduce` at the end of backward.
    """

    layout: Layout
    """Of the parameters in the last `lay_out`."""

    def __init__(self, options: SyncOptions, member: object | None, pass_counts: Sequence[int]) -> None:
        """Start without a layout.

        member: the GradSync; it takes part with zeros after this rank has called `join`.
        pass_counts: of each parameter, how many backward passes added to its gradient since the ranks last combined it.
        0 or 1 if GradSync does not count them (see its `_counts`).
        """
        self.options, self.member, self._pass_counts = options, member, pass_counts
        self.given: Set[int] = frozenset()
        """The parameters whose `.grad` may be memory that the script knows: it was set before the current backward."""
        self.hooks = None if options.comm_hook is None else options.comm_hook.queue()
        """Calls the communication hook."""
        self._sparse: frozenset[int] = frozenset()
        """Parameters (by index) that have had a sparse gradient on some rank."""
        self._next = known.NextOrder() if (known := extension("arrival_order")) is not None else None
        """Decides which order the buckets follow; None: the last parameter comes first."""
        self.is_known = False
        """Whether the other ranks of the current world know this reducer."""
        self._id = -1
        """Its ID in the process set, equal on all ranks."""
        self._members: list[Any] = []
        """What `members_of` returns, by ID."""
        self._buckets_sent = 0
        """Since `enter_world`. It names the step to communication hooks."""
        self.reduced = False
        """Whether the gradients were reduced since the last step."""
        self.used: set[int] = set()
        """The parameters to whose gradients some rank has contributed since the last step."""
        self.left_out: frozenset[int] = frozenset()
        """Those that no backward on any rank has reached since the last step, and that some rank could set since.

        Equal on all ranks."""
        self._compares_start = False
        """Whether the next reduction is followed by a comparison of the parameters."""
        self.divisor: int | Literal["active"] | None = None
        """What averages divide by, see Combiner.divide_by."""
        self.sets_early = False
        """Whether `.grad` may be a view of its bucket while that is being sent. It frees the tensors of backward."""

    @property
    def _channel(self) -> Channel:
        return channel_of(self.options.process_set)

    # Membership and layout

    def enter_world(self, params: Sequence[TrackedParameter], options: SyncOptions | None = None) -> None:
        """Compare the options and the layout of `params` between the ranks. Collective over the process set.

        options: new ones, not yet in use. None: those in use. Raises CollectiveMismatchError if the ranks differ.
        """
        options = options or self.options
        layout, start = Layout(params, options, self._sparse), ("compare_start", _compares_starts())
        call = Call(options.kind, (*layout.describe(), start), site=call_site())
        self._channel.run(call, lambda group, verdict: self._connect(layout))
        if not self.is_known:
            self._members = members_of(options.process_set)
            self._id = len(self._members)
            self._members.append(self.member)
            self.is_known = True
            self.compare_start()

    def _connect(self, layout: Layout) -> None:
        """On a device, reduce zeros of the size of each bucket. Collective, after the ranks have agreed.

        NCCL connects the ranks in the first allreduce of each algorithm, and the host waits for that
        (NCCL_RUNTIME_CONNECT in NCCL's src/init.cc). Backward sends buckets before the ranks agree. If another rank
        called something else then, the host would wait for it until the timeout, and find no mismatch.
        """
        if not current().backend.runs_ahead or layout.options.comm_hook is not None:
            return
        for bucket in layout.buckets:
            sent = torch.zeros(bucket.length, dtype=bucket.dtype, device=bucket.device)
            if layout.options.only_casts:  # a user's compressor may remember what it compresses
                sent, _ = layout.options.compression.compress(sent)
            self._start(self._channel, sent, "")[1].wait()

    def compare_start(self) -> None:
        """Compare the parameters of all ranks after the next reduction. Call it at the same place on all ranks."""
        self._compares_start = _compares_starts()

    def register_comm_hook(self, hook: Any) -> None:
        """Combine gradients by `hook`. Collective, and raises, as `enter_world` does; in an elastic job later."""
        if self.options.comm_hook is not None:
            raise RuntimeError("A communication hook can be registered only once.")
        options = replace(self.options, comm_hook=hook)
        if self.is_known:
            self.enter_world(self.layout.params, options)
        # Until now, another rank may have combined gradients without a hook.
        self.options, self.hooks = options, hook.queue()
        self.lay_out(self.layout.params)

    def forget_world(self) -> None:
        """Forget the world that is closed; the next one may have ranks that do not know this reducer."""
        if self.hooks is not None and self.options.comm_hook is not None:
            self.hooks.close()
            self.hooks = self.options.comm_hook.queue()
        self.is_known, self._buckets_sent, self._sparse, self._members = False, 0, frozenset(), []
        self.left_out = frozenset()
        self.lay_out(self.layout.params)

    def replace_member(self, member: object) -> None:
        """Free the memory, and let `member` take part in place of the current one. Local."""
        self.layout.release_memory()
        if self.is_known:
            self._members[self._id] = member
        self.member = member

    def lay_out(self, params: Sequence[TrackedParameter], order: Sequence[int] = ()) -> None:
        """Lay out buckets for `params`, and start over. order: of arrival, equal on all ranks; (): not known."""
        self.layout = Layout(params, self.options, self._sparse, order)
        self._order = order
        """The order of arrival that the buckets follow."""
        if self._next is not None:
            self._next.laid_out(order)
        self.start_over()

    def _lay_out_by(self, order: Sequence[int]) -> None:
        """Lay out buckets again after a reduction, and move the gradients there. Collective on a device."""
        moving = {index for sent in self._sent for index in sent.memory.held()} - self.given - self._sparse
        self.lay_out(self.layout.params, order)
        self._connect(self.layout)
        for place in range(len(self.layout.buckets)):
            self.layout.memory_of(place).take_gradients(moving)
        self.layout.start_over()

    def start_over(self) -> None:
        """Prepare for the next backward."""
        self.layout.start_over()
        self.is_last = False
        """Whether the next reduction is the first one since a step, and in a step: no gradient is set any more."""
        self._sent: list[SentBucket] = []
        """Those of this backward, in order."""
        self._kinds = b""
        """The kinds that this rank contributes to the buckets that were sent, see Contributions."""
        self._next_order: Sequence[int] = ()
        """The order that buckets follow from the next backward on; (): as now."""
        self.changes: list[str] = []
        """Descriptions of the parameters that were moved or replaced. `reduce` raises on all ranks if there are any."""

    # Sending

    def mark_ready(self, arrived: Sequence[int], *, at_end: bool = False) -> None:
        """Mark the gradients that have `arrived`, by index, as complete; send complete buckets whose turn it is.

        Other gradients move to their buckets early, and backward can reuse the memory that they had, while it is still
        in the cache: with linear layers of 50 MB, a step takes 5 to 10 % less time.
        """
        if not self.is_known:
            self.enter_world(self.layout.params)
        self.layout.order.mark(arrived)
        while self.layout.order.is_complete(len(self._sent)):
            self._send_next(is_complete=True, at_end=at_end)
        if self._can_set_early:
            for place, indices in self.layout.order.take_waiting(arrived, len(self._sent)).items():
                self.layout.memory_of(place).take_gradients(set(indices) - self.given)

    def _send_rest(self, *, empty: bool) -> None:
        while len(self._sent) < len(self.layout.buckets):
            self._send_next(empty=empty, at_end=True)

    def _send_next(self, *, empty: bool = False, is_complete: bool = False, at_end: bool = False) -> None:
        """Send the next bucket.

        Args:
            empty: with zeros.
            is_complete: whether backward has reached all of its parameters.
            at_end: whether `reduce` follows at once.
        """
        place, options, channel = len(self._sent), self.options, self._channel
        bucket, can_set_early = self.layout.buckets[place], self._can_set_early
        grads = [None] * len(bucket.params) if empty else self._all_contributions(bucket)
        counts, are_reached, unreached = self._pass_counts, [True] * len(grads), None
        if not (empty or is_complete or all(counts)):
            are_reached = [counts[slot.param] > 0 for slot in bucket.slots]
            pairs = zip(are_reached, bucket.params, strict=True)
            part = FINAL if self.is_last else LEFT_OUT
            unreached = [0 if is_reached or not param.hooks else part for is_reached, param in pairs]
        is_new = are_reached if self.reduced and not empty else None
        memory = self.layout.memory_of(place, grads, is_new, in_place=can_set_early)
        if (streams := bucket.params[0].streams) is not None:
            streams.follow([memory.flat, *(grad for grad in grads if grad is not None)])
        kinds = memory.pack(grads, is_new, unreached, self.given)
        self._kinds += kinds
        self._buckets_sent += 1
        self._count_sent(channel, place)
        if options.comm_hook is None:
            self._sent.append(self._allreduce(channel, place, memory, empty))
        else:
            self._sent.append(self._call_hook(channel, place, memory))
        if can_set_early and not options.sparse_as_dense:
            memory.set_early(kinds, at_end=at_end)

    def _count_sent(self, channel: Channel, place: int) -> None:
        """Add the bucket at `place` to the digest of the buckets that this rank has sent. -1: an abandoned backward."""
        channel.sent_digest = (channel.sent_digest * 1_000_003 + (self._id << 20) + place + 1) % (1 << 60)

    def _allreduce(self, channel: Channel, place: int, memory: BucketMemory, empty: bool) -> SentBucket:
        """Start the allreduce of a bucket. empty: this rank contributes zeros."""
        options, flat = self.options, memory.flat
        compressed, context, grad = flat, None, None
        if options.only_casts:
            compressed, context = options.compression.compress(flat)
        elif (view := self.layout.buckets[place].slots[0].view(flat)).numel():  # of one gradient, see Layout.buckets_in
            compressed, context = options.compression.compress(grad := view)
            if empty:  # what a compressor makes of zeros may be something else, such as NaN
                compressed = torch.zeros_like(compressed)
        dtype, shape = compressed.dtype, compressed.shape
        wire, work = self._start(channel, compressed.reshape(-1), f"{self._id}.{place}", memory)
        if not isinstance(work, FailedWork):
            work = self._recorded(channel, place, memory, work)

        def combined(factor: float) -> torch.Tensor:
            scale_(wire, factor)
            if grad is None:
                return wire
            found = options.compression.decompress(wire.to(flat.device, dtype).view(shape), context)
            grad.copy_(found.reshape(grad.shape))
            return flat

        return SentBucket(memory, work, combined)

    def _start(
        self, channel: Channel, sent: torch.Tensor, tag: str, memory: BucketMemory | None = None
    ) -> tuple[torch.Tensor, Work]:
        """Start the allreduce of `sent`. Return the tensor that gets the result, and the work.

        memory: keeps the memory for a copy on the host. None: the group can send from the device of `sent`.
        """
        group = channel.gradients
        device, dtype = group.wire_device(sent.device), wire_dtype(sent.dtype, group)
        if memory is not None and device != sent.device and device.type == "cpu":
            channel.through_host = channel.through_host or needed("through_host")(group)
            device = sent.device
        else:
            memory = None
        wire = sent.to(device, dtype)
        scale_(wire, self.options.reduction.prescale_factor)
        try:
            if memory is None and not (channel.through_host and channel.through_host.waiting):
                return wire, group.allreduce_(wire, Sum, tag)
            return wire, channel.through_host.allreduce_(wire, Sum, tag, memory)
        except HorovodInternalError as error:
            return wire, FailedWork(error)

    def _call_hook(self, channel: Channel, place: int, memory: BucketMemory) -> SentBucket:
        """Have the communication hook called for a bucket."""
        assert self.hooks is not None
        bucket, is_last = self.layout.buckets[place], place == len(self.layout.buckets) - 1
        step = f"{self._id}.{self._buckets_sent - place}"
        work = self.hooks.send(place, memory.flat, bucket, is_last, channel, step)
        recorded = self._recorded(channel, place, memory, work)
        return SentBucket(memory, recorded, lambda factor: work.result if work.error is None else work.error)

    @property
    def _can_set_early(self) -> bool:
        hook = self.options.comm_hook
        # A user's hook may run for long, in another thread. Until it ends, .grad stays this rank's own gradient.
        return self.sets_early and (hook is None or hook.only_starts)

    def _recorded(self, channel: Channel, place: int, memory: BucketMemory, work: Work) -> Work:
        names = (param.name for param in memory.params)
        return channel.observer.sent(work, f"gradients.{self._id}.{place}", names, memory.flat)

    def is_reduced(self, index: int) -> bool:
        """Return whether the gradient at `index` was reduced since the last step, and backward has not added to it."""
        return index in self.used and self._pass_counts[index] == 0 and index not in self.left_out

    def _all_contributions(self, bucket: Bucket) -> list[torch.Tensor | None]:
        """Return the gradients that this rank sends in `bucket`."""
        grads = [param.tensor.grad for param in bucket.params]
        sends_all = self.options.reduction.op == Average or not self.reduced
        has_only_dense = not self._sparse and not self.options.sparse_as_dense
        if sends_all and has_only_dense and fit(bucket.params, grads):
            return grads
        return [self._contribution(slot.param) for slot in bucket.slots]

    def _contribution(self, index: int) -> torch.Tensor | None:
        """Return the gradient that this rank sends for the parameter at `index`, if any.

        With op Average, a gradient that was reduced before is sent again, because other ranks may have added to theirs.
        """
        param = self.layout.params[index]
        if change := param.moved():
            self.changes.append(change)
            return None
        grad = param.tensor.grad
        if grad is None or (self.options.reduction.op != Average and self.is_reduced(index)):
            return None
        if not fit([param], [grad]):
            self.changes.append(
                f"the gradient of {param.name!r} is {tuple(grad.shape)}, {grad.dtype} on {grad.device} instead of "
                f"{tuple(param.shape)}, {param.dtype} on {param.device}"
            )
            return None
        if self.options.sparse_as_dense and grad.is_sparse:
            return grad.to_dense()
        if index in self._sparse and not grad.is_sparse:  # it has no place in the bucket
            return grad.to_sparse(1)
        return grad

    def abandon(self, completed: Sequence[int]) -> str | None:
        """End the sending of a backward that has failed or repeats gradients, and start over.

        Return the name of a parameter whose gradient was overwritten by that, None if there is none.

        completed: the gradients that a backward had completed when it failed. Every bucket that they complete is sent,
            with zeros, because other ranks, which may expect another order, have sent it.
        """
        self.layout.order.start_over()
        self.layout.order.mark(completed)
        while self.layout.order.is_complete(len(self._sent)):
            self._send_next(empty=True)
        held = (index for sent in self._sent for index in sent.memory.held())
        overwritten = next((self.layout.params[index].name for index in held), None)
        if self.options.comm_hook is None:
            received = CombinedWork([sent.work for sent in self._sent])
            self._channel.receive(self._announcement(self._channel), received.wait)
        else:  # other ranks may take part only after the announcement
            self.layout.release_memory()
        self.start_over()
        if overwritten is not None:
            # A rank that raises must not continue with ranks that do not raise.
            self._count_sent(self._channel, -1)
        return overwritten

    # Receiving

    @torch.no_grad()
    def reduce(self, *, empty: bool = False, arrived: Sequence[int] = ()) -> None:
        """Send the remaining buckets, wait for all, and make the results the gradients. Collective.

        Gradients are matched by the order in which they are sent. If a backward fails on one rank, or one rank repeats
        it alone, that rank is therefore out of step until the next shutdown() and init().

        Args:
            empty: contribute zeros instead of this rank's gradients.
            arrived: in which order one backward has completed gradients, if that may be the order of the next ones.

        Raises:
            ValueError: parameters were moved or replaced on this rank.
            HorovodInternalError: parameters were moved or replaced only on other ranks, or the ranks are out of step.
            CollectiveMismatchError: another rank called something else.
        """
        if not self.is_known:
            self.enter_world(self.layout.params)
        self._send_rest(empty=empty)
        channel, changes = self._channel, self.changes
        order: Sequence[int] = ()
        if self._next is not None and channel.gradients.rank == 0:
            order = self._next.after(arrived, self.layout, self._must_keep_buckets)
        call = self._announcement(channel, array("i", order).tobytes())
        for sent in self._sent:
            if isinstance(sent.work, FailedWork):  # the error finds the rank that has left
                in_turn(call, channel.receive, call, sent.work.wait)
        if self._sent and not channel.num_joined:  # a joined rank sends only after the announcement
            with channel.observer.waiting_for_data():
                in_turn(call, self._sent[-1].work.wait_for, _DATA_FIRST_SECONDS)
        try:
            # On a device, also compare the calls that ran ahead in this step.
            run = channel.run if channel.ahead is None else channel.ahead.end_step
            wrong = run(call, functools.partial(self._settle, self._kinds))
        except CollectiveMismatchError:
            # The others also wait for the data before they raise.
            in_turn(call, channel.receive, call, self._receive, channel, keep=False, settled=False)
            channel.sent_digest = 0  # no rank uses what was sent, in whatever order
            raise
        mismatch = channel.ahead and channel.ahead.end_step_of_parts(call, channel, current().channels)
        with channel.observer.waiting_for_data():
            keep = not (wrong or mismatch)
            hook_error = in_turn(call, channel.receive, call, self._receive, channel, keep=keep, settled=not wrong)
        if mismatch:
            raise mismatch
        if changes:
            raise ValueError(
                f"The parameters of {self.options.kind} must not change after it was made, but "
                f"{changes[0]}. Move or change the model first, then wrap it."
            )
        if wrong:
            raise HorovodInternalError(
                f"Gradients were not combined: on ranks {wrong}, parameters of {self.options.kind} were moved or "
                "replaced after it was made. Move or change the model first, then wrap it."
            )
        compares, self._compares_start = self._compares_start and not channel.num_joined, False
        if hook_error is not None:
            raise hook_error
        self.reduced = True
        if compares and (compare := extension("compare_start")) is not None:
            compare(self.layout.params, self.options, self._id)

    def _must_keep_buckets(self) -> bool:
        """Return whether each bucket must keep its gradients: a hook or compressor of the user may remember them."""
        hook = self.options.comm_hook
        is_plain = self.options.only_casts if hook is None else hook.only_starts
        return not is_plain or any(sent.memory.is_kept for sent in self._sent)

    def must_combine_left_out(self) -> bool:
        """Return whether the script has given numbers to a gradient in `left_out`, on some rank.

        Collective if no backward has reached some parameter.
        """
        if not self.left_out:
            return False
        count = int(any(has_numbers(self.layout.params[index].tensor.grad) for index in self.left_out))
        call = Call(SYNCHRONIZE, self._arguments, site=call_site(), count=count)
        return self._channel.run(call, lambda group, verdict: any(verdict.counts))

    @property
    def _arguments(self) -> tuple[tuple[str, int | None], ...]:
        return ("process_set", self.options.process_set.process_set_id), ("grad_sync", self._id)

    def _announcement(self, channel: Channel, payload: bytes = b"") -> Call:
        """Return the call that announces a reduction, at the user's line. payload: an order for the buckets.

        It is a message between CPUs: nothing that the ranks must know of each other's gradients is read from a GPU. Its
        count is the digest of the buckets that were sent, and in the lowest bits whether parameters were moved or
        replaced, and whether the kinds have changed.
        """
        bits = 2 * bool(self.changes) + (self._kinds != self.layout.contributions.announced)
        count = 4 * channel.sent_digest + bits
        return Call(GRADIENTS, self._arguments, site=call_site(), count=count, payload=payload)

    def _settle(self, kinds: bytes | None, group: Group, verdict: Verdict) -> list[int]:
        """Return the ranks on which parameters were moved or replaced. If there are none, exchange kinds that changed.

        Collective, after the agreement on an announcement. kinds: what this rank contributes; None on a rank that has
        joined. Raises OutOfStepError if the ranks have sent different buckets.
        """
        active = [place for place in range(group.size) if place not in verdict.joined]
        if len({verdict.counts[place] >> 2 for place in active}) > 1:
            raise OutOfStepError(
                "the ranks have not sent the same number of gradient buckets, or not in the same order, because a "
                "backward failed or was repeated on some ranks only, or gave several optimizers their gradients in "
                "another order"
            )
        wrong = [group.ranks[place] for place in active if verdict.counts[place] & 2]
        any_changed = any(verdict.counts[place] & 1 for place in active)
        # A member that has joined does not announce that it contributes nothing now.
        if not wrong and (any_changed or (verdict.joined and not self.layout.contributions.is_complete)):
            self.layout.contributions.exchange(group, kinds)
        if not wrong and any(verdict.payloads):
            self._next_order = array("i", verdict.payloads[0]).tolist()
        return wrong

    @torch.no_grad()
    def contribute_nothing(self, group: Group, verdict: Verdict) -> None:
        """Take part in a `reduce` of the other ranks with zeros.

        This rank has called `join`, or the ranks called different things (`verdict.call` is None).
        """
        self.start_over()
        self._send_rest(empty=True)
        settled = verdict.call is not None and not self._settle(None, group, verdict)
        if settled:
            self._compares_start = False  # the others have passed the first reduction without this rank
        channel = self._channel
        call = self._announcement(channel)
        channel.receive(call, self._receive, channel, keep=False, settled=settled)
        if verdict.call is None:
            channel.sent_digest = 0
        self.start_over()

    def _receive(self, channel: Channel, *, keep: bool, settled: bool) -> Exception | None:
        """Wait for the data of the announced buckets. Return what a communication hook has raised.

        Args:
            keep: whether the received data becomes the gradients; if not, they are cleared.
            settled: whether all ranks know which gradients are sparse. If not, no rank combines those.
        """
        group, reduction = channel.gradients, self.options.reduction
        factor = reduction.postscale_factor * self._correction(channel)
        divided_by = group.size if reduction.op == Average else 1
        sparse: dict[int, torch.Tensor | None] = {}
        error: Exception | None = None
        can_repeat = self.options.can_repeat and not channel.num_joined
        for place, sent in enumerate(self._sent):
            sent.work.wait()
            memory = sent.memory
            kinds = self.layout.contributions.combined_now(place, can_repeat=can_repeat)
            if keep:
                combined = sent.combined(factor / (divided_by if memory.factor == 1.0 else 1))
                if isinstance(combined, torch.Tensor):
                    memory.fill(combined)
                else:
                    error = error or combined
                self.used.update(memory.contributed(kinds))
                memory.set_gradients(kinds)
            else:
                for index in memory.held():
                    self.layout.params[index].tensor.grad = None
            if settled and max(kinds) & SPARSE:
                sparse |= memory.dense_parts(kinds)
        for index, dense_part in sorted(sparse.items()):
            own, param = self._contribution(index) if keep else None, self.layout.params[index].tensor
            factor = self._correction(channel) / divided_by
            parts = own, param, dense_part if keep else None
            combined = needed("sparse_gradients")(group, *parts, factor)
            if keep:
                param.grad = combined
        if keep:
            left_out = self.layout.contributions.left_out
            self.left_out = self.left_out & left_out if self.reduced else left_out
        if sparse.keys() - self._sparse or self._next_order:
            self._sparse |= sparse.keys()
            self._lay_out_by(self._next_order or self._order)
        return error

    def _correction(self, channel: Channel) -> float:
        """Return what a division by the number of ranks must be multiplied by, to be one by `divisor`."""
        if self.options.reduction.op != Average or self.divisor is None:
            return 1.0
        size = channel.gradients.size
        active = size - channel.num_joined
        return size / (active if self.divisor == "active" else self.divisor)
