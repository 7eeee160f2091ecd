"""Which gradients the current backward has completed, and in which order.

A hook on each parameter reports its gradient, which is handled then. Beside the core, arrival_order.py handles them in
groups if the order is the same as in the last backward.

A gradient may be sent when the next one arrives: until then others may change or read it, in hooks of its parameter
that were registered later, or in hooks of its autograd node, as torch's DistributedDataParallel does.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Callable, Sequence

import torch
from torch._C import _current_autograd_node, _current_graph_task_id

from ..compiling import not_compiled
from .buckets import TrackedParameter
from .layout import ArrivalOrder

_queue_callback = torch.autograd.Variable._execution_engine.queue_callback


class Arrivals:
    """The gradients that have arrived in the current backward. Parameters are given by index."""

    def __init__(
        self,
        params: Sequence[TrackedParameter],
        pass_counts: list[int],
        at_begin: Callable[[int], None],
        handle_single: Callable[[int], None],
        mark_ready: Callable[[Sequence[int]], None],
        at_end: Callable[[], None],
    ) -> None:
        """Prepare. Local.

        Args:
            params: the parameters to which indices refer; more may be added.
            pass_counts: of each, see Reducer.
            at_begin: called with the first gradient of each autograd graph task.
            handle_single: called with a gradient; it calls `add_single` if that is to be combined.
            mark_ready: called with a group of gradients in the expected order.
            at_end: called once at the end of each autograd graph task in which a gradient was handled, and after each
                nested one for which it has called `continue_outside`.
        """
        self._params, self._pass_counts = params, pass_counts
        self._at_begin, self._at_end = at_begin, at_end
        self._handle_single, self._mark_ready = handle_single, mark_ready
        self._handle = handle_single
        """Called with the gradient that has arrived last."""
        self.arrived: list[int] = []
        """Parameters whose gradients the current backward has completed, in order."""
        self.handled: set[int] = set()
        """Those that are sent, or are going to be combined at the end of this backward."""
        self._lock = threading.RLock()
        """Held by a hook: autograd runs the hooks of parameters on different devices in different threads."""
        self._tasks: dict[int, weakref.ref[Callable[[], None]]] = {}
        """Autograd graph tasks that call `at_end` at their end, each with what it calls."""
        self._task: int | None = None
        """The newest one of `_tasks`."""
        self._seen_task: int | None = None
        """The graph task of the gradient that was looked at last."""
        self._has_nested = False
        """Whether some gradients were completed by a graph task within another one."""
        self._late_task: int | None = None
        """The graph task that will call `at_end` again."""

    @property
    def has_one_task(self) -> bool:
        """Whether one graph task completed all gradients that were handled. Reentrant checkpoints run nested tasks."""
        return len(self._tasks) == 1 and not self._has_nested

    @property
    def has_failed(self) -> bool:
        """Whether an earlier graph task has not called `at_end`, because backward raised an exception."""
        return _current_graph_task_id() not in self._tasks and any(end() is None for end in self._tasks.values())

    def expect(self, order: ArrivalOrder | None) -> None:
        """Start over, and expect the gradients of the next backward in `order`; None: handle them one by one."""
        self.arrived.clear()
        self._task = None

    def hook_of(self, index: int) -> Callable[[torch.Tensor], None]:
        """Return a hook that records that backward has completed the gradient of the parameter at `index`."""
        arrived = self.arrived

        @not_compiled
        def on_gradient(_: torch.Tensor) -> None:
            arrived.append(index)
            with self._lock:
                self._on_arrival(index)

        return on_gradient

    def _on_arrival(self, index: int) -> None:
        """Handle the gradients that have arrived, if it is time.

        Raises RuntimeError in compiled autograd, which calls nothing at its end: gradients would not be combined.
        """
        if _in_compiled_backward():
            self.arrived.clear()
            raise RuntimeError(
                "Compiled autograd must be off, because dualdist combines gradients in hooks of autograd, but it is on "
                "instead. Set torch._dynamo.config.compiled_autograd = False; torch.compile works without it."
            )
        if (streams := self._params[index].streams) is not None:
            streams.follow()  # a bucket is packed on one stream
        if self._seen_task != (task := _current_graph_task_id()):
            self._seen_task = task
            try:
                self._at_begin(index)
            except BaseException:
                self.arrived.clear()
                raise
        self._handle(index)

    def take_arrived(self, count: int | None = None) -> list[int]:
        """Record the first `count` gradients of the expected order as handled, and return those that are new."""
        return []

    def add_single(self, index: int) -> None:
        """Record a gradient as handled that is combined at the end of backward at the latest."""
        self._end_with_backward()
        self.handled.add(index)

    def _end_with_backward(self) -> None:
        """Call `at_end` at the end of the current autograd graph task."""
        self._task = _current_graph_task_id()
        if self._task not in self._tasks:  # reentrant checkpoints run nested tasks, each with its own end
            end = functools.partial(self._at_end)  # it exists as long as the graph task
            self._tasks[self._task] = weakref.ref(end)
            _queue_callback(end)

    def are_in_backward(self) -> bool:
        """Return whether this thread runs a backward."""
        return bool(_current_graph_task_id() != -1)

    def awaits_end(self) -> bool:
        """Return whether `at_end` is due at the end of the current autograd graph task."""
        return _current_graph_task_id() in self._tasks

    def is_last_call(self) -> bool:
        """Return whether `at_end` is called for the second time, after what others do at the end of this backward.

        At the first time, it will be called again.
        """
        if self._late_task == self._task or self._task is None:
            return True
        self._late_task = self._task
        _queue_callback(self._at_end)
        return False

    def continue_outside(self) -> bool:
        """Return whether this backward runs within another one, as that of a reentrant checkpoint does.

        Then `at_end` is called at the end of that one. A backward in a backward is made by a node that gets a gradient
        for one of its inputs, so that another node follows it.
        """
        node = _current_autograd_node()
        following = () if node is None else node.next_functions
        outer = next((function for function, _ in following if function is not None), None)
        if outer is None:
            return False
        self._has_nested = True
        self._tasks.pop(_current_graph_task_id(), None)

        @not_compiled
        def begin(_: object) -> None:
            handle.remove()
            self._end_with_backward()

        handle = outer.register_prehook(begin)
        return True

    def release(self) -> None:
        """Drop the callbacks, whose object may refer to this one. The hooks have been removed."""

        def ignore(*_: object) -> None:
            pass

        self._at_begin = self._handle_single = self._handle = self._mark_ready = self._at_end = ignore

    def forget(self) -> None:
        """Forget the gradients that have arrived, and the graph tasks that will call `at_end`."""
        self._has_nested = False
        self.arrived.clear()
        self.handled.clear()
        self._tasks.clear()


def _in_compiled_backward() -> bool:
    """Return whether compiled autograd runs the current backward (`torch._dynamo.config.compiled_autograd`)."""
    module = sys.modules.get("torch._dynamo.compiled_autograd")
    if module is None:
        return False
    # Before torch 2.5, the setting itself ends with the compiled backward.
    return bool(getattr(module, "in_compiled_autograd_region", module.compiled_autograd_enabled))
