"""Combines the gradients of all ranks during backward; they are complete when `backward()` returns.

A hook on each parameter runs when backward completes a gradient, and a callback at the end of backward waits for the
results. GradSync decides when to combine; Reducer sends and receives. One implementation serves both backends, both
wrappers, gradient accumulation, parameters that a rank does not use, sparse gradients, and `join`.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import math
import operator
import pickle
import sys
import weakref
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch

from .. import extension
from ..agreement.connections import Verdict
from ..backends.base import Group
from ..compiling import not_compiled
from ..types import Average
from ..world import current
from . import arrivals
from .buckets import TrackedParameter, has_numbers, without_memory
from .combiner import OPTIMIZER, Combiner, Named, SyncOptions, alive, combiners_of
from .reducer import Reducer, members_of

_NUM_ALONE = 10
"""A GradSync that had so many backwards for itself sends before the end of backward, though older ones exist."""
_MOST_USES = 3
"""How many references C++ has to a parameter at the end of backward, if torch's DDP has none: of the object in Python,
the node that accumulates its gradient, and a retained graph. DDP has at least two (`params_` and `Bucket::variables` in
reducer.hpp). A retained graph that uses it twice looks the same; then gradients are only sent later."""


class GradSync(Combiner):
    """Combines the gradients of some parameters over a process set, in every backward that completes them."""

    _num_made: ClassVar[int] = 0

    def __init__(
        self, named: Named, options: SyncOptions, owner: object, passes: int = 1, *, compares_late: bool = False
    ) -> None:
        """Register hooks on the parameters. Collective, as `add` is.

        owner: the optimizer or module; the hooks are removed when it is deleted. passes: how many backward passes
        accumulate before gradients are combined. compares_late: the ranks compare the layout at the first gradients.
        Then this is local, and needs no world.
        """
        self.kind, self.passes = options.kind, passes
        self.after_combining: Callable[[], None] | None = None
        """Called when the gradients have been combined, if not None."""
        self._compares_late = compares_late
        self._pass_counts: list[int] = []
        """Of each parameter, see Reducer. It stays the same list, which Reducer and Arrivals have as well."""
        self._reducer = Reducer(options, self, self._pass_counts)
        # A module leaves gradients alone that the script has set; an optimizer combines them before a step.
        self._reducer.reduced = options.kind is not OPTIMIZER
        self._averages = options.reduction.op == Average
        self._params: list[TrackedParameter] = []
        self._tensors: list[torch.Tensor] = []
        """The parameters themselves; none after `release`."""
        self._unhooked: set[int] = set()
        """Parameters that lack a hook."""
        self._hooks: list[dict[int, Any]] = []
        """All hooks on the complete gradients of each parameter that has one of ours."""
        self._watched: list[Any] = []
        """Those dictionaries, and our hook in each. A script may remove it, or replace the dictionary."""
        self._references: dict[bool, int] = {}
        """What `_count_references` returned when `watch` last looked at each parameter, outside our hooks and in one:
        more refer to a hook that runs."""
        self._first = -1
        """The parameter whose gradient arrived first in the last backward. It has one more hook: `watch`."""
        make = (extension("arrival_order") or arrivals).Arrivals
        callbacks = self._begin, self._handle_single, self._reducer.mark_ready, self._end_of_backward
        self._arrivals: arrivals.Arrivals = make(self._params, self._pass_counts, *callbacks)
        self._enabled = True
        self._counted: set[int] = set()
        """Parameters whose passes the current backward has counted."""
        self._repeats = False
        """Whether one backward may complete a gradient several times. Then none is sent before its end."""
        self._has_observed = False
        """Whether one whole backward has run. Until then nothing is sent early: a gradient may be completed twice."""
        self._overlaps = False
        """Whether another GradSync combines some of the same gradients."""
        self._number = GradSync._num_made = GradSync._num_made + 1
        self._num_alone = 0.0
        """How many backwards had gradients of this, but of no older GradSync of the same ranks. -inf: one had both."""
        self._sends_late = False
        """Whether buckets are sent at the end of backward only, because an older GradSync may send some meanwhile.

        Buckets are matched in the order in which they are sent, and ranks may complete them in other orders. If that
        happens after _NUM_ALONE backwards of this GradSync alone, the digest of the order differs: an error."""
        self._is_shared = False
        """Whether torch's DDP has some of the parameters: it moves their gradients, and combines them as well."""
        self._newest: dict[torch.device, int] = {}
        """The gradient that has arrived last from each device. It may be sent when the next one arrives."""
        self.add(named)
        weakref.finalize(owner, self.release).atexit = False

    def add(self, named: Named) -> None:
        """Add parameters. Collective over the process set: the ranks compare the layout.

        In an elastic job they compare it at the first gradients, because a later process is alone when it makes one.
        """
        added = [TrackedParameter(name, tensor) for name, tensor in named]
        if not self._compares_late and not current().launch.elastic:
            self._reducer.enter_world([*self._params, *added])
        # After the comparison: if it fails, training can continue with the old ones.
        for other in combiners_of([tensor for _, tensor in named]):
            if isinstance(other, GradSync):
                for sync in (self, other):
                    sync._overlaps, sync._reducer.sets_early = True, False
        alive.add(self)
        indices = range(len(self._params), len(self._params) + len(added))
        self._unhooked.update(indices)
        self._params += added
        self._tensors += [tensor for _, tensor in named]
        self._pass_counts += [0] * len(added)
        self._reducer.left_out = self._reducer.left_out.union(indices)
        self._reducer.given = self._indices = frozenset(range(len(self._params)))
        self._first = len(self._params) - 1  # mostly; `_end` looks
        self.watch()
        self._reducer.lay_out(self._params)
        self._start_over()

    def params(self) -> list[torch.Tensor]:
        return list(self._tensors)

    def passes_of(self) -> dict[torch.Tensor, int]:
        """Return how many passes have added to each parameter's gradient since the ranks last combined it."""
        return dict(zip(self._tensors, self._pass_counts, strict=True))

    @not_compiled
    def watch(self, *_: object, in_hook: bool = False) -> None:
        """Register hooks on parameters that have none, before a backward or in it: this is a hook itself.

        in_hook: called by a hook on a complete gradient.
        """
        lost = self._register_hooks(in_hook)
        if self._reducer.reduced and not self._counts:
            # An earlier backward may have added to their gradients. To combine an average again does no harm.
            for index in lost:
                if self._tensors[index].grad is not None:
                    self._pass_counts[index] = 1

    def _register_hooks(self, in_hook: bool = False) -> set[int]:
        """Register hooks where `requires_grad` has become True, or where the script has removed them.

        Returns the parameters, by index, from which it had removed them.
        """
        is_changed = self._count_references() != self._references.get(in_hook)
        lost = {
            index
            for index, param in enumerate(self._params if is_changed else ())
            if param.hooks and param.hooks[0].id not in (param.tensor._post_accumulate_grad_hooks or ())
        }
        self._unhooked |= lost
        found = [index for index in self._unhooked if self._tensors[index].requires_grad]
        for index in found:
            self._register(index)
        if found or is_changed:
            self._unhooked.difference_update(found)
            hooked = [param for param in self._params if param.hooks]
            self._hooks = [param.tensor._post_accumulate_grad_hooks or {} for param in hooked]
            self._watched = self._hooks + [
                hooks.get(param.hooks[0].id, hooks) for param, hooks in zip(hooked, self._hooks, strict=True)
            ]  # no variable refers to these
            if found:
                self._references.clear()
            self._references[in_hook] = self._count_references()
        return lost

    def _count_references(self) -> int:
        """Count the references to what is watched: faster than to look at all parameters."""
        return sum(map(sys.getrefcount, self._watched))

    def _register(self, index: int) -> None:
        param, tensor = self._params[index], self._tensors[index]
        for hook in param.hooks:
            hook.remove()
        if type(hooks := tensor._post_accumulate_grad_hooks) is dict:  # torch needs one with weak references
            tensor._post_accumulate_grad_hooks = OrderedDict(hooks)
        param.hooks = [tensor.register_post_accumulate_grad_hook(self._arrivals.hook_of(index))]
        if not self._averages:  # averaging equal averages again changes nothing
            before = not_compiled(functools.partial(self._before_gradient, index))
            param.hooks.append(tensor.register_hook(before))
        if index == self._first:
            param.hooks.append(tensor.register_hook(self.watch))

    def release(self) -> None:
        """Free the parameters, also when the owner is deleted."""
        super().release()
        self._tensors.clear()
        self._unhooked.clear()
        self._hooks, self._watched, self._references = [], [], {}
        for param in self._params:
            param.release()
        # These two refer to this object: without them, it is freed at once.
        self._reducer.replace_member(ReleasedSync(self._reducer))
        self._arrivals.release()

    def forget_world(self) -> None:
        """Prepare for the next world, whose ranks may not know this GradSync. Called when a world is closed."""
        for param in self._params:
            param.record_placement()
        self._reducer.forget_world()
        self._start_over()

    def contribute_nothing(self, group: Group, verdict: Verdict) -> None:
        """Take part with zeros when the other ranks combine gradients, see Reducer.contribute_nothing."""
        self._start_over()
        self._reducer.contribute_nothing(group, verdict)
        self._expect_order()  # the layout may have changed

    def compare_start(self) -> None:
        """Compare the parameters of all ranks after their next reduction, as after the first one."""
        self._reducer.compare_start()

    @property
    def is_in_world(self) -> bool:  # type: ignore[override]
        return self._reducer.is_known

    def shadow(self) -> None:
        self._start_over()
        try:
            self._reducer.reduce(empty=True)
        finally:
            self._start_over()

    @property
    def can_repeat(self) -> bool:  # type: ignore[override]
        return self._reducer.options.can_repeat

    def divide_by(self, number: int | Literal["active"] | None) -> None:
        self._reducer.divisor = number

    def share(self) -> None:
        """Combine gradients after torch's DDP, which combines them as well, at the end of each backward. Local."""
        self._is_shared, self._reducer.sets_early = True, False
        self._expect_order()

    def _start_over(self) -> None:
        self._newest.clear()
        self._reducer.start_over()
        self._expect_order()
        self._arrivals.forget()

    def _begin(self, first: int) -> None:
        """Note which parameters have a gradient before this backward. That at `first` is the first to have a new one.

        Raises RuntimeError if the gradients are going to be part of another graph, which would not know their average.
        """
        if torch.is_grad_enabled():
            raise RuntimeError(
                "`create_graph` must be False in backward(), because .grad becomes the average over the ranks, but is "
                "True instead. Use torch.autograd.grad(loss, parameters, create_graph=True), and then backward()."
            )
        self.watch(in_hook=True)
        if not self._is_shared and self._tensors[first]._use_count() > _MOST_USES:
            self.share()
        given = {index for index, tensor in enumerate(self._tensors) if tensor.grad is not None}
        grad = self._tensors[first].grad
        # Backward adds to a gradient in place, which counts its version up.
        if grad is None or grad._version == 0:
            given.discard(first)
        self._reducer.given = given

    def _before_gradient(self, index: int, _: torch.Tensor) -> None:
        """Raise AssertionError if backward is going to add to a gradient that was combined, unless the op is Average.

        To combine that gradient again would give a wrong result.
        """
        param = self._params[index]
        if self._reducer.is_reduced(index) and has_numbers(param.tensor.grad):
            raise AssertionError(
                "Gradients were computed more than backward_passes_per_step times before call to step(): "
                f"{param.name!r} holds a gradient already that is combined, or was set since. Increase "
                "backward_passes_per_step to accumulate gradients locally."
            )

    def _handle_single(self, index: int) -> None:
        """Handle a gradient outside the expected order: count its pass. It may be sent when the next one arrives."""
        pass_counts, has_failed = self._pass_counts, self._arrivals.has_failed
        # Count what the failed backward completed before adding this pass.
        completed = list(filter(self._can_send_early, self._arrivals.handled)) if has_failed else []
        if self._counts or not self.enabled:
            if has_failed:
                for other in self._counted:
                    pass_counts[other] -= 1
                self._counted.clear()
            if index not in self._counted:
                # As Horovod counts them, whatever the script does to the gradient in between.
                pass_counts[index] += 1
            if not self.enabled:
                if has_failed:
                    self._restart(has_failed, completed)
                self._arrivals.arrived.clear()
                return
            self._counted.add(index)
        else:
            pass_counts[index] = 1
        if has_failed or index in self._arrivals.handled:
            self._restart(has_failed, completed)
        self._arrivals.add_single(index)
        if self._can_send_early(index):
            device = self._params[index].device
            before = self._newest.get(device)
            self._newest[device] = index
            if before is not None:
                self._reducer.mark_ready([before])

    @property
    def _sends_at_end(self) -> bool:
        """Whether gradients must not be sent before the end of backward."""
        return self._repeats or self._is_shared or self._sends_late

    def _can_send_early(self, index: int) -> bool:
        """Return whether the gradient of a parameter that has arrived may be sent before the end of backward."""
        return self._has_observed and not self._sends_at_end and self._pass_counts[index] >= self.passes

    @property
    def _counts(self) -> bool:
        """Whether passes are counted. If every backward combines an average, combining again does no harm."""
        return self.passes > 1 or not self._averages

    def _follows(self, other: GradSync) -> bool:
        """Return whether `other` is older and combines gradients of the same ranks."""
        is_older = other._number < self._number
        return is_older and other._reducer.options.process_set == self._reducer.options.process_set

    def _expect_order(self) -> None:
        """Decide whether the next backward handles gradients in the order of the last one, and when it sends them."""
        may_meet = self._num_alone < _NUM_ALONE
        self._sends_late = may_meet and any(sync.is_in_world and self._follows(sync) for sync in _syncs())
        is_regular = self._enabled and not (self._counts or self._sends_at_end)
        self._arrivals.expect(self._reducer.layout.order if is_regular else None)

    def _restart(self, has_failed: bool, completed: Sequence[int]) -> None:
        """Start over, because gradients were sent in a backward that has not ended.

        Buckets that were sent already are sent again.

        has_failed: it has raised an exception. Otherwise reentrant checkpoints complete one gradient several times.
        completed: as for Reducer.abandon.
        """
        self._repeats |= not has_failed
        overwritten = self._reducer.abandon(completed)
        self._start_over()
        if overwritten is not None:
            fix = (
                "Call zero_grad(set_to_none=True) when backward has failed."
                if has_failed
                else "Use checkpoint(..., use_reentrant=False), or zero_grad(set_to_none=True), and repeat the step."
            )
            raise RuntimeError(
                f"The gradient of {overwritten!r} was sent before its backward was complete, and is overwritten. {fix}"
            )

    @not_compiled
    def _end_of_backward(self) -> None:
        """End the backward for all whose gradients it has completed, in the same order on all ranks."""
        if not self._arrivals.awaits_end() or self._arrivals.continue_outside():
            return
        awaiting = (sync for sync in _syncs() if sync._arrivals.awaits_end())
        together = sorted(awaiting, key=lambda sync: sync._number)
        if any(sync._sends_late and not sync._has_observed for sync in together):
            gc.collect()  # the older GradSync, for which this one sends late, may be garbage
        for sync in together:
            sync._num_alone += -math.inf if any(map(sync._follows, together)) else 1
            if sync._is_shared or not sync._has_observed:
                sync._is_shared = any(tensor._use_count() > _MOST_USES for tensor in sync._tensors)
        if any(sync._is_shared for sync in together) and not self._arrivals.is_last_call():
            return  # first, others complete what they combine in their memory
        for sync in together:
            sync._end()

    def _end(self) -> None:
        if self._is_shared:
            self._reducer.given = self._indices
        if arrived := self._arrivals.take_arrived():
            with torch.no_grad():
                self._reducer.mark_ready(arrived, at_end=True)
        arrived, has_one_task = list(self._arrivals.arrived), self._arrivals.has_one_task
        layout = self._reducer.layout
        if arrived != layout.order.expected:  # else no hook is missing
            if arrived and arrived[0] != self._first:
                self._first = arrived[0]
                self._unhooked.add(self._first)
            self.watch()
        if any(self._pass_counts[index] >= self.passes for index in self._arrivals.handled):
            grads = (self._params[index].tensor.grad for index in self._arrivals.handled)
            if all(grad is None for grad in grads) and self._has_hooks():
                raise RuntimeError(
                    "Gradients must be there when backward() ends, to be combined, but hooks have removed all of "
                    "them. An optimizer that steps in hooks uses this rank's gradients. Use torch.distributed.optim."
                    "_apply_optimizer_in_backward, or a DistributedOptimizer for each parameter."
                )
            self._combine(arrived if has_one_task and not self._sends_at_end else ())
            self._has_observed |= has_one_task
            layout = self._reducer.layout
            # On several devices there are several threads, and the order differs from backward to backward.
            can_learn = has_one_task and layout.is_on_one_device and not self._counts
            if can_learn and arrived != layout.order.expected:
                layout.order.learn(arrived)
                self._expect_order()
        self._counted.clear()
        self._arrivals.forget()

    @contextlib.contextmanager
    def disabled(self) -> Iterator[None]:
        before, self.enabled = self.enabled, False
        try:
            yield
        finally:
            self.enabled = before

    @property
    def enabled(self) -> bool:
        return self._enabled

    @enabled.setter
    def enabled(self, enabled: bool) -> None:
        self._enabled = enabled
        self._expect_order()

    def synchronize(self) -> None:
        """Combine gradients that backward left uncombined. Collective when there are any.

        Raises RuntimeError within backward, unless there is only one parameter, whose gradient is complete.
        """
        if self._arrivals.are_in_backward() and len(self._params) > 1:
            raise RuntimeError(
                "step() must not be called in a hook of backward, where gradients are still this rank's own and not "
                "all complete, but is. Call it after backward(), or make a DistributedOptimizer for each parameter."
            )
        self._arrivals.take_arrived()
        self._register_hooks()
        self._reducer.given = self._indices  # backward has ended, so that the script knows its gradients
        # First as backward does: other ranks may have combined there.
        if not self._reducer.reduced or any(self._pass_counts):
            self._reducer.is_last = not self._reducer.reduced
            self._combine()
        if self._reducer.must_combine_left_out():
            for index in self._reducer.left_out:  # as if a backward had reached them
                if self._tensors[index].grad is not None:
                    self._pass_counts[index] = 1
            self._combine()

    def check(self, param_groups: Sequence[Mapping[str, Any]]) -> None:
        params = [param for group in param_groups for param in group["params"]]
        if len(params) == len(self._tensors) and all(map(operator.is_, params, self._tensors)):
            return
        known = set(map(id, self._tensors))
        for param in params:
            if id(param) not in known:
                self.refuse(f"one of shape {tuple(param.shape)} was put into param_groups without add_param_group()")

    def before_step(self) -> None:
        self.fill_unused()

    def fill_unused(self) -> None:
        """Give zeros to parameters that no rank used, as Horovod does (horovod/torch/optimizer.py:177)."""
        if len(self._reducer.used) < len(self._params):
            self.fill({id(self._tensors[index]) for index in self._reducer.used})

    def after_step(self) -> None:
        self._reducer.reduced = False
        self._reducer.used.clear()

    def set_passes(self, passes: int) -> None:
        self.passes = passes
        self._expect_order()

    @property
    def comm_hook(self) -> Any:
        return self._reducer.options.comm_hook

    def register_comm_hook(self, hook: Any) -> None:
        self._reducer.register_comm_hook(hook)
        self._expect_order()  # the layout has changed

    def _has_hooks(self) -> bool:
        """Return whether the script has hooks on complete gradients. They may look at those of other parameters."""
        return max(map(len, self._hooks), default=0) > 1

    def refuse(self, reason: str) -> None:
        self._reducer.changes.append(reason)
        self._combine()

    def _combine(self, arrived: Sequence[int] = ()) -> None:
        """Combine the gradients now. Collective. Raises as Reducer.reduce does. arrived: as for that."""
        self._arrivals.take_arrived()
        try:
            self._reducer.reduce(arrived=arrived)
        finally:
            self._start_over()
            self._counted.clear()
        # Only after a complete backward is it known whether each gradient is completed once, see `_restart`.
        is_alone = not (self._repeats or self._overlaps or self._is_shared)
        self._reducer.sets_early = is_alone and not self._has_hooks()
        self._pass_counts[:] = [0] * len(self._pass_counts)
        self._reducer.given = self._indices
        if self.after_combining is not None:
            self.after_combining()


class ReleasedSync:
    """What a world keeps of a GradSync that was released: it is small, and can contribute zeros, see Reducer."""

    def __init__(self, reducer: Reducer) -> None:
        self._options, layout = reducer.options, reducer.layout
        params = [(p.name, p.shape, p.tensor.stride(), p.dtype, p.device) for p in layout.params]
        numbers = {name: getattr(reducer, name) for name in ("_id", "_sparse", "_order", "_buckets_sent", "divisor")}
        self._packed = zlib.compress(pickle.dumps((params, layout.contributions, numbers)))
        self._hooks = reducer.hooks
        if self._hooks is not None and self._hooks.ends_within(0.0):
            self._hooks = None  # it holds what was sent last

    def contribute_nothing(self, group: Group, verdict: Verdict) -> None:
        """Let a Reducer do it, now and later: another rank uses it while this one has joined, or in a mismatch."""
        params, contributions, numbers = pickle.loads(zlib.decompress(self._packed))
        reducer = Reducer(self._options, None, [0] * len(params))
        vars(reducer).update(numbers, is_known=True)
        released = [TrackedParameter(name, without_memory(*placement)) for name, *placement in params]
        reducer.lay_out(released, numbers["_order"])
        reducer.layout.contributions = contributions
        members_of(self._options.process_set)[numbers["_id"]] = reducer
        reducer.contribute_nothing(group, verdict)

    def compare_start(self) -> None:
        """Do nothing: this rank has no parameters to compare."""

    def forget_world(self) -> None:
        if self._hooks is not None:
            self._hooks.close()


def _syncs() -> Iterator[GradSync]:
    return (one for one in alive if isinstance(one, GradSync) and not one.is_released)
