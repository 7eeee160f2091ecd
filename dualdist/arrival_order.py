"""Makes use of the order in which backward completes gradients: mostly the one of the last backward.

In the expected order, gradients are handled in groups, each when a bucket can be sent or filled. And buckets follow the
order of the first backward, as in DDP, or one that many backwards have had.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._C import _current_graph_task_id

from .core.compiling import not_compiled
from .core.gradients import arrivals
from .core.gradients import layout as core_layout
from .core.gradients.buckets import Bucket
from .core.gradients.layout import Layout

_MOVE_BYTES = 1 << 20
"""How much may wait on a CPU until it is moved to the buckets, see Reducer.mark_ready."""


class ArrivalOrder(core_layout.ArrivalOrder):
    """Also remembers the order of a complete backward, and when to move gradients to their buckets."""

    stops: Sequence[int] = ()
    """How many gradients have arrived in that order each time that some can be sent or moved.

    Arrivals acts one gradient later."""

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        super().__init__(buckets)
        self._bytes = {
            slot.param: slot.shape.numel() * bucket.dtype.itemsize if bucket.device.type == "cpu" else 0
            for bucket in buckets
            for slot in bucket.slots
        }

    def start_over(self) -> None:
        self._missing = list(self._sizes)
        self._waiting: list[int] = []
        """Gradients that have arrived since the last move to the buckets."""
        self._waiting_bytes = 0

    def take_waiting(self, arrived: Sequence[int], sent: int) -> Mapping[int, Sequence[int]]:
        """Return what should move: all gradients on the CPU that wait, or none while they are small.

        Sparse ones have no place in a bucket.
        """
        self._waiting_bytes += sum(map(self._bytes.__getitem__, arrived))
        self._waiting += arrived
        taken: dict[int, list[int]] = {}
        if self._waiting_bytes < _MOVE_BYTES:
            return taken
        for index in self._waiting:
            if self._bytes[index] and (place := self.bucket_of[index]) >= sent:
                taken.setdefault(place, []).append(index)
        self._waiting, self._waiting_bytes = [], 0
        return taken

    def learn(self, order: Sequence[int]) -> None:
        if len(order) != len(self.bucket_of) or set(order) != self.bucket_of.keys():
            return
        self.start_over()
        sent, stops = 0, []
        for count, index in enumerate(order, 1):
            self.mark([index])
            before = sent
            while self.is_complete(sent):
                sent += 1
            if self.take_waiting([index], sent) or sent > before:
                stops.append(count)
        self.expected, self.stops = list(order), stops
        self.start_over()


class Arrivals(arrivals.Arrivals):
    """Handles gradients in groups while they arrive in the expected order."""

    _expected: Sequence[int] = ()
    _stops: Sequence[int] = ()
    """Numbers of gradients that can be sent or moved together. They must have arrived, and one more."""
    _num_handled = 0
    """How many of `arrived` are in `handled`, while gradients arrive in the expected order."""
    _next_stop = 0
    """The next one of `_stops`. 0: gradients are handled one by one."""

    def expect(self, order: Any) -> None:
        self.take_arrived()
        super().expect(order)
        self._num_handled = 0
        self._expected, self._stops = (order.expected, order.stops) if order is not None else ((), ())
        self._next_stop = self._stops[0] if self._stops else 0
        self._handle = self._follow_order if self._stops else self._handle_single

    def hook_of(self, index: int) -> Callable[[torch.Tensor], None]:
        """Return the hook of a parameter. It runs for every gradient, so it must be fast."""
        arrived, param, task = self.arrived, self._params[index], _current_graph_task_id

        @not_compiled
        def on_gradient(_: torch.Tensor) -> None:
            arrived.append(index)
            streams = param.streams
            if (
                len(arrived) > self._next_stop
                or task() != self._task
                or (streams is not None and streams.current_handle() != streams.last)
            ):
                with self._lock:
                    self._on_arrival(index)

        return on_gradient

    def _follow_order(self, index: int) -> None:
        """Handle gradients up to the next stop. If they do not follow the expected order, handle each by itself."""
        count, done = len(self.arrived) - 1, self._num_handled  # without the newest one
        is_other_task = _current_graph_task_id() != self._task
        # If some are handled, this was another graph task, which has failed or continues.
        if not (is_other_task and (count or self.handled)):
            if is_other_task:
                self._end_with_backward()
            if count < self._next_stop:
                return
            if self.arrived[done:count] == self._expected[done:count]:
                self._mark_ready(self.take_arrived(count))
                self._next_stop = next((stop for stop in self._stops if stop > count), 0)
                if self._next_stop:
                    return
        earlier = self.arrived[self._num_handled :]
        earlier.remove(index)
        self._next_stop, self._handle = 0, self._handle_single
        if _current_graph_task_id() != self._task:
            # They belong to a backward that has failed, or to one around this one: reentrant checkpoints.
            self._record(earlier)
            earlier = []
        for other in [*earlier, index]:
            self._handle_single(other)

    def take_arrived(self, count: int | None = None) -> list[int]:
        arrived = self.arrived[self._num_handled : count] if self._next_stop else []
        self._num_handled += len(arrived)
        self._record(arrived)
        return arrived

    def _record(self, indices: Sequence[int]) -> None:
        """Record these gradients as handled. Passes are not counted here: each has 1."""
        pass_counts = self._pass_counts
        for index in indices:
            pass_counts[index] = 1
        self.handled.update(indices)


# The order of the buckets.

_BACKWARDS_IN_TURN = 10
"""How many backwards must have another order before buckets follow it; the next time twice as many, and so on."""
_LEAST_GAIN = 0.02
"""How much more of backward must be left to send a byte in another order, see `overlap`."""


class NextOrder:
    """Decides, on the first rank of a process set, in which order buckets are sent from the next backward on.

    The order is that of the first backward that completes all gradients, as in DDP. Later it is one that
    `_BACKWARDS_IN_TURN` have had, and each time twice as many, so that it does not change forever.
    """

    _patience = 0
    """How many backwards in turn must have another order; 0: one, if it has all gradients."""
    _seen: Sequence[int] = ()
    """The order of the last backward, and how many in turn had it. 0: it needs no other buckets."""
    _times_seen = 0

    def laid_out(self, order: Sequence[int]) -> None:
        """Buckets follow `order` from now on, or no order that was seen."""
        self._patience = max(_BACKWARDS_IN_TURN, 2 * self._patience) if order else 0
        self._seen, self._times_seen = (), 0

    def after(self, arrived: Sequence[int], layout: Layout, must_stay: Callable[[], bool]) -> Sequence[int]:
        """Return the order after a backward in which gradients have `arrived` in this one; (): as now."""
        is_seen = arrived == self._seen
        if not arrived or (is_seen and not self._times_seen):
            return ()
        self._seen, self._times_seen = arrived, self._times_seen + 1 if is_seen else 1
        is_first = not self._patience and len(arrived) == sum(bool(param.hooks) for param in layout.params)
        if not is_first and self._times_seen < max(_BACKWARDS_IN_TURN, self._patience):
            return ()
        order = list(dict.fromkeys([*arrived, *range(len(layout.params))[::-1]]))
        gain = overlap(layout.buckets_in(order), arrived) - overlap(layout.buckets, arrived)
        if gain < _LEAST_GAIN or must_stay():
            self._times_seen, self._patience = 0, max(_BACKWARDS_IN_TURN, self._patience)
            return ()
        return order


def overlap(buckets: Sequence[Bucket], order: Sequence[int]) -> float:
    """Return how much of backward is left when a byte can be sent: 0 to 1, the mean over all bytes.

    order: in which gradients arrive. Those that are not in it are sent at the end.
    """
    arrival, sent, left = {index: place for place, index in enumerate(order, 1)}, 0, 0
    for bucket in buckets:
        sent = max(sent, *(arrival.get(slot.param, len(order)) for slot in bucket.slots))
        left += bucket.nbytes * (len(order) - sent)
    return left / max(1, len(order) * sum(bucket.nbytes for bucket in buckets))
