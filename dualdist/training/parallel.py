"""DistributedDataParallel: a module that averages its gradients over all ranks, with torch's interface, on any backend.

GradSync combines the gradients, as for DistributedOptimizer. The wrapper adds what belongs to a module: equal
parameters at the start, equal buffers before each forward, and names in state dicts (see state_names.py). It is no
subclass of torch's class, which is built around a Reducer in C++; but isinstance() holds (see torch_interface.py).
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch.utils._pytree import tree_map_only

from ..agreement import call_kinds
from ..agreement.call import remember_call_site
from ..backends.torch_interface import (
    disabled_join,
    group_of_mesh,
    join_hook,
    notify_join,
    register_data_parallel,
    take_over_optimizers,
)
from ..checks import flag, number, wrong
from ..collectives.allreduce import allreduce
from ..collectives.join import join, share_grad_scaler
from ..collectives.reduction import Reduction
from ..compiling import not_compiled
from ..gradients.bucket_memory import BUCKET_BYTES
from ..gradients.combiner import Combiner, NullCombiner
from ..gradients.grad_sync import GradSync
from ..gradients.options import SyncOptions
from ..types import Average, Max, Sum
from ..world.process_sets import ProcessSet, global_process_set, reporting
from ..world.ranks import rank, size
from .parallel_arguments import (
    MixedPrecision,
    bucket_groups,
    check_delayed,
    checked_buffers,
    checked_caps,
    checked_device_ids,
    checked_mixed_precision,
    checked_module,
    reduction_of,
)
from .parallel_interface import BufferHook, TorchInterface
from .parameters import broadcast_parameters
from .sync_batch_norm import set_of_group

# Training with different numbers of batches on the ranks, behind DistributedDataParallel.


class JoinedTraining:
    """What a wrapper does in the block of `join`, and after it."""

    def __init__(self, combiner: Combiner, *, divides_by_active: bool = False, throws: bool = False) -> None:
        """Start the block. throws: whether every rank raises as soon as one has no more data."""
        self._combiner = combiner
        self._throws = throws
        self.in_join: Callable[[], None] = lambda: None
        """Called before each forward in a Join of torch. Collective."""
        combiner.divide_by_active(divides_by_active)

    def before_forward(self) -> None:
        """Raise RuntimeError if another rank has no more data and `throws` is set; that is collective."""
        if self._throws and self._count_active(True) < size():
            self._throw()

    def end(self) -> int:
        """Take part for the others until all have left the block. Return the rank that left last. Collective."""
        if self._throws and self._count_active(False):
            self._throw()
        return join()

    def torch_hook(
        self, at_end: Callable[[int], None], process_set: ProcessSet, kwargs: Mapping[str, Any]
    ) -> Any:
        """Return a JoinHook of torch.

        at_end: called with the rank that joined last, on each member of `process_set`. kwargs: those of Join.
        """
        divides_by_active = not flag(
            "divide_by_initial_world_size", kwargs.get("divide_by_initial_world_size", True)
        )

        def count(is_active: bool) -> None:
            if divides_by_active:
                self._combiner.divide_by(self._count_active(is_active, process_set))

        def shadow() -> None:
            count(False)
            self._combiner.shadow()

        def end(is_last: bool) -> None:
            candidate = torch.tensor([rank() if is_last else -1])
            at_end(int(allreduce(candidate, op=Max, name="join.last", process_set=process_set)))

        self.in_join = functools.partial(count, True)
        return join_hook(shadow, end)

    def _count_active(self, is_active: bool, process_set: ProcessSet = global_process_set) -> int:
        active = torch.tensor([int(is_active)])
        return int(allreduce(active, op=Sum, name="join.active", process_set=process_set))

    def _throw(self) -> None:
        raise RuntimeError("Detected at least one rank that exhausted inputs. Throwing across all ranks.")


class JoinInterface(TorchInterface):
    """The part of DistributedDataParallel for uneven inputs."""

    _joined: JoinedTraining | None
    _torch_join: JoinedTraining | None
    _join_config: Any
    _join_hook: Callable[[], Any]
    """Returns torch's Join hook while the context exists."""

    @contextlib.contextmanager
    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Iterator[None]:
        """Train with different numbers of batches: a rank that leaves the `with` block still takes part for the others.

        It contributes zeros to their backward passes. Buffers are not broadcast in the block. At the end every rank has
        the parameters and buffers of the rank that left last. Collective over the world.

        Args:
            divide_by_initial_world_size: True: averages divide by the size of the world. False: by the number of ranks
                that are still in the block.
            enable: False: do nothing.
            throw_on_early_termination: when one rank has no more data, raise RuntimeError on every rank instead. Each
                forward then exchanges a message.

        Raises ValueError when `process_group` is not the whole world.
        """
        by_all = flag("divide_by_initial_world_size", divide_by_initial_world_size)
        throws = flag("throw_on_early_termination", throw_on_early_termination)
        if not flag("enable", enable):
            yield
            return
        if self._process_set is not global_process_set:
            raise ValueError(
                "`process_group` must be the whole world for join(), but is another process set instead."
            )
        self._joined = JoinedTraining(self._combiner, divides_by_active=not by_all, throws=throws)
        try:
            yield
            self._overwrite(self._joined.end())
        finally:
            self._combiner.divide_by_active(False)
            self._joined = None

    def join_hook(self, **kwargs: Any) -> Any:
        """Return what torch.distributed.algorithms.Join calls on a rank without more data."""
        self._torch_join = JoinedTraining(self._combiner)

        def end(root_rank: int) -> None:
            self._overwrite(root_rank)
            share_grad_scaler(root_rank, self._process_set)
            self._forget_join()

        hook = self._torch_join.torch_hook(end, self._process_set, kwargs)
        self._join_hook = weakref.ref(hook)
        return hook

    def _forget_join(self) -> None:
        """Leave a Join context of torch, which leaves its configuration in what has joined."""
        self._torch_join, self._join_config = None, disabled_join()
        self._combiner.divide_by(None)

    def _overwrite(self, root_rank: int) -> None:
        """Overwrite parameters and buffers with those of rank `root_rank`. Collective."""
        self._broadcast(
            dict(self._named()) | (self._named_buffers() if self.forward_sync_buffers else {}), root_rank
        )


class DistributedDataParallel(JoinInterface):
    """Averages the gradients of `module` over the ranks in every backward.

    Gradients are complete when `backward()` returns. Parameters that some or all ranks do not use need no option.
    Use either this or DistributedOptimizer, not both. Collective: every member of `process_group` must call it with
    the same parameters; on other ranks the module trains alone.

    `isinstance(wrapper, torch.nn.parallel.DistributedDataParallel)` holds. Names in `state_dict()` are torch's, as in
    the module tree ("module.0.weight"), because torch.distributed.checkpoint and torch.func.functional_call need equal
    names. The bare name ("0.weight") also finds its entry, `load_state_dict` accepts both, and torch.save and
    dualdist.checkpoint write bare names, so a file loads with and without the wrapper.

    A copy (`copy.deepcopy`, pickle) belongs to no world until its gradients are first combined; that is collective, and
    its forward before that is not.

    Args:
        module: any module; its parameters and buffers are overwritten with those of the first member of the set.
        device_ids: [device] to move tensors among the inputs to. None: they stay where they are.
        broadcast_buffers: False copies no buffers at all, neither at the start nor before a forward. None: True.
        forward_sync_buffers: False copies buffers at the start, but not before a forward; it replaces
            `broadcast_buffers`, as in torch 2.13. Buffers are copied before each forward in training mode with
            gradients enabled. Other forwards are not collective, unlike torch's: one rank may evaluate alone.
        init_sync: False leaves parameters and buffers as they are.
        process_group: the ranks that average: a ProcessSet, or a process group of torch. None: all ranks.
        device_mesh: a DeviceMesh with one dimension, instead of `process_group`.
        bucket_cap_mb: how many MiB of gradients are sent at once. None: 25.
        bucket_cap_mb_list: the same for each bucket, in the order of backward; the last number is repeated.
        delay_all_reduce_named_params, param_to_hook_all_reduce: accepted; these gradients are averaged like all others.
        mixed_precision: a torch.nn.parallel.distributed._MixedPrecision. Forward computes with parameters and inputs
            cast to `param_dtype`, and floating-point buffers are cast to `buffer_dtype` once. Gradients are sent as
            `reduce_dtype` (None: `param_dtype`). Parameters and their gradients keep their dtype.
        output_device, dim, find_unused_parameters, check_reduction, gradient_as_bucket_view, static_graph,
        skip_all_reduce_unused_params, batched_grad_copy, lazy_bucket_allocation: accepted as in torch
            (torch/nn/parallel/distributed.py), without effect: unused parameters are always found, and gradients are
            always views of the buckets.

    Raises:
        CollectiveMismatchError: the parameters differ between ranks in number, name, shape or dtype.
        TypeError: an argument is of a wrong type, `module` is distributed already, or has DTensors as parameters.
        ValueError: an argument has a wrong value, or `module` has a torch.nn.SyncBatchNorm that cannot work.
        RuntimeError: no parameter of `module` requires a gradient, or one has no shape yet.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        device_ids: Sequence[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: Any = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        delay_all_reduce_named_params: Sequence[tuple[str, torch.nn.Parameter]] | None = None,
        param_to_hook_all_reduce: torch.nn.Parameter | None = None,
        mixed_precision: Any = None,
        device_mesh: Any = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: Sequence[float] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
        lazy_bucket_allocation: bool = False,
    ) -> None:
        super().__init__()
        with reporting(call_kinds.DATA_PARALLEL, process_group):  # the other ranks must not wait for this one
            process_set = _set_of_group_or_mesh(process_group, device_mesh)
        with reporting(call_kinds.DATA_PARALLEL, process_set):
            ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
            named = checked_module(module, ignored)
            check_delayed(delay_all_reduce_named_params, param_to_hook_all_reduce, module)
            mixed_precision = checked_mixed_precision(mixed_precision)
            devices = checked_device_ids(device_ids, {param.device for _, param in named})
            copies_first, copies = checked_buffers(broadcast_buffers, forward_sync_buffers)
            init_sync = flag("init_sync", init_sync)
            if bucket_cap_mb is not None:
                number("bucket_cap_mb", bucket_cap_mb, above=0, fix="Pass None for 25.")
            caps = checked_caps(bucket_cap_mb_list)
        self.module = module
        self.device_ids = devices or None
        self.output_device = output_device
        self.dim = dim
        self.device = named[0][1].device
        self.device_type = self.device.type
        self.is_multi_device_module = len({param.device for _, param in named}) > 1
        self.device_mesh = device_mesh
        self.mixed_precision = mixed_precision
        self._casts: MixedPrecision | None = None
        self.forward_sync_buffers = copies
        self.parameters_to_ignore = ignored
        self.find_unused_parameters = find_unused_parameters
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.static_graph = static_graph
        self.skip_all_reduce_unused_params = skip_all_reduce_unused_params
        self.batched_grad_copy = batched_grad_copy
        self.lazy_bucket_allocation = lazy_bucket_allocation
        self.require_forward_param_sync = True
        self.bucket_bytes_cap_default = bucket_cap_mb is None
        self.bucket_bytes_cap = BUCKET_BYTES if bucket_cap_mb is None else int(bucket_cap_mb * 2**20)
        self.bucket_bytes_cap_list = [int(cap * 2**20) for cap in caps]
        self._process_group = process_group
        self._process_set = process_set
        self._buffer_hook: BufferHook | None = None
        groups = bucket_groups(caps, [param for _, param in named])
        self._bucket_options = {"bucket_cap_mb": bucket_cap_mb, "groups": groups}
        self._requires_sync = True
        self._enter()
        if process_set.included():
            if init_sync:
                self._broadcast(dict(named) | (self._named_buffers() if copies_first else {}))
            self._combine_gradients(named, compares_late=False)
        if mixed_precision is not None:
            self._casts = MixedPrecision(module, mixed_precision, ignored)

    def _enter(self) -> None:
        """Prepare what belongs to this object alone, not to its copies."""
        self._combiner = NullCombiner()
        self._joined = self._torch_join = None
        self._join_config = disabled_join()
        self._join_hook = lambda: None
        self._syncs_buffers = False
        """Whether the current forward synchronizes buffers."""
        self._in_backward: list[torch.Tensor] | None = None
        """Parameters whose optimizers step in backward; None before the first forward."""
        self._wrapped = {id(param): param for param in self.module.parameters()}
        self._record_parts()

    def _combine_gradients(
        self, named: Sequence[tuple[str, torch.nn.Parameter]], compares_late: bool
    ) -> None:
        options = SyncOptions(
            Reduction(Average),
            reduction_of(self.mixed_precision),
            self._process_set,
            owner=call_kinds.DATA_PARALLEL,
            **self._bucket_options,  # type: ignore[arg-type]
        )
        self._combiner = GradSync(named, options, self, compares_late=compares_late)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the module. Collective in training mode while gradients are enabled, when it has buffers."""
        if self.device_ids is not None:
            inputs, kwargs = tree_map_only(torch.Tensor, self._to_device, (inputs, kwargs))
        self._prepare()
        if self._casts is not None:
            inputs, kwargs = self._casts.cast_inputs((inputs, kwargs))
        elif self._buffer_hook is None:  # nothing must follow here: torch.compile would compile it apart
            return self.module(*inputs, **kwargs)
        with self._casts or contextlib.nullcontext():
            outputs = self.module(*inputs, **kwargs)
        self._sync_buffers(after_forward=True)
        return outputs

    @not_compiled
    def _prepare(self) -> None:
        """Make buffers equal, and check that the parameters are still those that were wrapped."""
        self._syncs_buffers = False
        remember_call_site()
        if self._torch_join is not None:
            if (
                self._join_hook() is None or not self._join_config.enable
            ):  # an exception has ended the context
                self._forget_join()
            else:
                notify_join(self)
                self._torch_join.in_join()
        if self._in_backward is None:
            self._take_over_optimizers()
        if not self._combiner.enabled or not torch.is_grad_enabled():
            return
        self._combiner.watch()
        if self._joined is not None:
            self._joined.before_forward()
        is_changed = _identities(self._parts) != self._recorded
        if is_changed and not any(type(param) is torch.Tensor for param in self.module.parameters()):
            self._record_parts()
        is_joining = self._joined is not None or self._torch_join is not None
        is_alone = is_joining or not self._combiner.is_in_world
        self._syncs_buffers = self.forward_sync_buffers and self.training and not is_alone
        self._sync_buffers(after_forward=False)
        if not is_changed:
            return
        for name, param in self._named():
            # functional_call puts plain tensors in the places of parameters for one forward.
            if id(param) not in self._wrapped and type(param) is not torch.Tensor:
                self._combiner.refuse(f"{name!r} is now a different parameter")

    @not_compiled
    def _sync_buffers(self, *, after_forward: bool) -> None:
        hook = self._buffer_hook
        is_time = after_forward == (hook is not None and hook.after_forward)
        if not self._syncs_buffers or not is_time or not any(part._buffers for part in self._parts):
            return
        if hook is None:
            self._broadcast(self._named_buffers())
        else:
            hook.run(self._named_buffers())

    def _record_parts(self) -> None:
        self._parts = list(self.module.modules())
        self._recorded = _identities(self._parts)

    def _named(self) -> list[tuple[str, torch.nn.Parameter]]:
        """Return the parameters whose gradients are averaged, with their names in the module."""
        named = self.module.named_parameters()
        return [(name, param) for name, param in named if name not in self.parameters_to_ignore]

    def _named_buffers(self) -> dict[str, torch.Tensor]:
        named = self.module.named_buffers()
        return {name: buffer for name, buffer in named if name not in self.parameters_to_ignore}

    def _take_over_optimizers(self) -> None:
        """Have optimizers that step in backward step when the gradients are combined."""
        self._in_backward = []
        if isinstance(self._combiner, GradSync):
            self._in_backward = take_over_optimizers(param for _, param in self._named())
            if self._in_backward or self._buffer_hook is not None:
                end = functools.partial(_end_backward, self._in_backward, self._buffer_hook)
                self._combiner.after_combining = end

    # Synchronization

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether the next backward combines gradients. `no_sync` sets it."""
        return self._requires_sync

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, required: bool) -> None:
        self._requires_sync = required
        if not isinstance(self._combiner, NullCombiner):
            self._combiner.enabled = required

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients locally in the `with` block. The next backward averages the accumulated gradients.

        What counts is where `backward()` runs, not forward as in torch: a backward outside always averages, also after
        `model.module(inputs)` or a second time for the same forward, where torch silently leaves local gradients.
        """
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def _broadcast(self, named: Mapping[str, torch.Tensor], root_rank: int | None = None) -> None:
        if named:
            ranks = self._process_set.ranks
            root_rank = (ranks[0] if ranks else 0) if root_rank is None else root_rank
            broadcast_parameters(named, root_rank, process_set=self._process_set)

    def _to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(cast(list[torch.device], self.device_ids)[0], non_blocking=True)

    # Copies

    def extra_repr(self) -> str:
        return "" if self._combiner.is_in_world else "in no world before its gradients are first combined"

    def __getstate__(self) -> dict[str, Any]:
        if self._process_set is not global_process_set:
            raise RuntimeError(
                "`process_group` must be the whole world to copy or pickle a wrapper, but is another process set "
                "instead. Copy its `module`."
            )
        local = [
            "_combiner",
            "_process_set",
            "_process_group",
            "_joined",
            "_torch_join",
            "_join_hook",
            "_join_config",
        ]
        local += ["_wrapped", "_parts", "_recorded", "_in_backward", "_requires_sync"]
        return {name: value for name, value in self.__dict__.items() if name not in local}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._process_set, self._process_group = global_process_set, None
        self._requires_sync = True
        self._enter()
        self._combine_gradients(self._named(), compares_late=True)


def _set_of_group_or_mesh(process_group: Any, device_mesh: Any) -> ProcessSet:
    """Return the process set that one of the two arguments means. Raises ValueError if there are two, or TypeError."""
    if device_mesh is None and process_group is None:
        return global_process_set
    if device_mesh is None:
        return set_of_group("process_group", process_group, registered=True)
    if process_group is not None:
        raise ValueError(
            "`device_mesh` must be None if `process_group` is passed, but is not. Pass one of them."
        )
    group = group_of_mesh(device_mesh)
    if group is None:
        fix = "Pass one, or mesh['dp']."
        raise wrong("device_mesh", "a DeviceMesh of one dimension", device_mesh, fix, TypeError)
    return set_of_group("device_mesh", group, registered=True)


def _end_backward(params: Sequence[torch.Tensor], buffer_hook: BufferHook | None) -> None:
    """Wait for buffers, and step the optimizers of `params`. No method: a reference would keep the wrapper alive."""
    if buffer_hook is not None:
        buffer_hook.wait()
    for param in params:
        for optimizer in cast(Any, param)._in_backward_optimizers:
            optimizer.step()
        param.grad = None


def _identities(parts: Sequence[torch.nn.Module]) -> list[int]:
    """Return the ids of the parameters and modules in `parts`; this is cheaper than named_parameters()."""
    members: list[object] = []
    for part in parts:
        members += part._parameters.values()
        members += part._modules.values()
    return list(map(id, members))


register_data_parallel(DistributedDataParallel)
