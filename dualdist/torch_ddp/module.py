"""DistributedDataParallel: a SynchronizedModule with torch's interface.

It is no subclass of torch's class, which is built around a Reducer in C++; but isinstance() holds.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import torch
from torch.distributed.algorithms.join import Join, JoinHook
from torch.nn.parallel import DistributedDataParallel as TorchDataParallel
from torch.utils._pytree import tree_map_only

from ..core import needed
from ..core.backends.torch_groups import world_group
from ..core.checks import flag, number, wrong
from ..core.collectives.allreduce import allreduce
from ..core.collectives.join import join
from ..core.compiling import CAN_SPLIT_GRAPHS, not_compiled
from ..core.gradients.buckets import BUCKET_BYTES, FIRST_BUCKET_BYTES
from ..core.gradients.combiner import Combiner
from ..core.gradients.grad_sync import GradSync
from ..core.lifecycle import rank, size
from ..core.training.parallel import DATA_PARALLEL, SynchronizedModule, checked_module
from ..core.types import Max, Sum
from ..core.world import global_process_set, reporting
from .arguments import (
    bucket_groups,
    check_delayed,
    checked_buffers,
    checked_caps,
    checked_device_ids,
    logged_facts,
    set_of_group_or_mesh,
)
from .mixed_precision import MixedPrecision, checked_mixed_precision, reduction_of
from .state import WrappedState, with_prefix


class DistributedDataParallel(SynchronizedModule):
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
        bucket_cap_mb: how many MiB of gradients are sent at once. None: 25, on a CPU 8.
        bucket_cap_mb_list: the same for each bucket, in the order of backward; the last number is repeated.
        delay_all_reduce_named_params, param_to_hook_all_reduce: accepted; these gradients are averaged like all others.
        mixed_precision: a torch.nn.parallel.distributed._MixedPrecision. Forward computes with parameters and inputs
            cast to `param_dtype`, and floating-point buffers are cast to `buffer_dtype` once. Gradients are sent as
            `reduce_dtype` (None: `param_dtype`). Parameters and their gradients keep their dtype.
        find_unused_parameters, static_graph, gradient_as_bucket_view: accepted as in torch
            (torch/nn/parallel/distributed.py), without effect: unused parameters are always found, and gradients are
            always views of the buckets.
        output_device, dim, check_reduction, skip_all_reduce_unused_params, batched_grad_copy, lazy_bucket_allocation:
            accepted, without effect.

    Raises:
        CollectiveMismatchError: the parameters differ between ranks in number, name, shape or dtype.
        TypeError: an argument is of a wrong type, `module` is distributed already, or has DTensors as parameters.
        ValueError: an argument has a wrong value, or `module` has a torch.nn.SyncBatchNorm that cannot work.
        RuntimeError: no parameter of `module` requires a gradient, or one has no shape yet.
    """

    _of_this_rank: ClassVar[set[str]] = {
        *("_combiner", "_process_set", "_wrapped", "_parts", "_recorded"),
        *("_process_group", "_torch_join", "_join_config", "_in_backward", "_futures"),
    }
    """Attributes that copies do not get."""

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
        with reporting(DATA_PARALLEL, process_group):  # the other ranks must not wait for this one
            process_set = set_of_group_or_mesh(process_group, device_mesh)
        with reporting(DATA_PARALLEL, process_set):
            ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
            named = checked_module(module, ignored)
            check_delayed(delay_all_reduce_named_params, param_to_hook_all_reduce, module)
            mixed_precision = checked_mixed_precision(mixed_precision)
            device = checked_device_ids(device_ids, {param.device for _, param in named})
            copies_first, copies = checked_buffers(broadcast_buffers, forward_sync_buffers)
            init_sync = flag("init_sync", init_sync)
            if bucket_cap_mb is not None:
                number("bucket_cap_mb", bucket_cap_mb, above=0, fix="Pass None for the usual sizes.")
            caps = checked_caps(bucket_cap_mb_list)
        super().__init__(
            module,
            process_set,
            ignored=ignored,
            named=named,
            init_sync=init_sync,
            copies_first=copies_first,
            forward_sync_buffers=copies,
            compression=reduction_of(mixed_precision),
            bucket_cap_mb=bucket_cap_mb,
            groups=bucket_groups(caps, [param for _, param in named]),
        )
        self.device_ids = None if device is None else [device]
        self.device = named[0][1].device
        self.device_type = self.device.type
        self.is_multi_device_module = len({param.device for _, param in named}) > 1
        self.device_mesh = device_mesh
        self.mixed_precision = mixed_precision
        # Attributes of torch's class, without effect here.
        self.__dict__.update(
            output_device=output_device,
            dim=dim,
            find_unused_parameters=find_unused_parameters,
            gradient_as_bucket_view=gradient_as_bucket_view,
            static_graph=static_graph,
            skip_all_reduce_unused_params=skip_all_reduce_unused_params,
            batched_grad_copy=batched_grad_copy,
            lazy_bucket_allocation=lazy_bucket_allocation,
            require_forward_param_sync=True,
        )
        # By these torch.compile splits graphs. As in torch also on a CPU, where buckets are smaller by default.
        self.bucket_bytes_cap_default = bucket_cap_mb is None
        self.bucket_bytes_cap = BUCKET_BYTES if bucket_cap_mb is None else int(bucket_cap_mb * 2**20)
        self.bucket_bytes_cap_list = [int(cap * 2**20) for cap in caps]
        self._process_group: Any = process_group
        self._buffer_hook: Callable[[Any], Any] | None = None
        """Synchronizes buffers, which it gets by their names, in place of copying rank 0's. It may return futures."""
        self._hooks_after_forward = True
        """Whether it is called after forward, not before."""
        self._casts = None if mixed_precision is None else MixedPrecision(module, mixed_precision, ignored)

    def _enter(self) -> None:
        super()._enter()
        self._requires_sync = True
        """The value of `require_backward_grad_sync`."""
        self._process_group = None
        self._is_joining = self._throws_early = False
        """Whether this is the block of `join`, and whether every rank raises as soon as one has no more data."""
        self._torch_join: weakref.ref[Any] | None = None
        """The hook in a Join context of torch. It exists as long as the context."""
        self._divides_by_active = False
        """Whether averages divide by the number of active ranks in a Join context of torch."""
        self._in_backward: list[torch.Tensor] | None = None
        """Parameters whose optimizers step in backward; None before the first forward."""
        self._futures: list[Any] = []
        """What the hook for buffers has returned."""

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the module. Collective in training mode while gradients are enabled, when it has buffers."""
        if self.device_ids is not None:
            move = operator.methodcaller("to", self.device_ids[0], non_blocking=True)
            inputs, kwargs = tree_map_only(torch.Tensor, move, (inputs, kwargs))
        self._prepare()
        if self._casts is not None:
            inputs, kwargs = self._casts.cast_inputs((inputs, kwargs))
        elif self._buffer_hook is None and torch.compiler.is_compiling():
            return self.module(*inputs, **kwargs)  # nothing must follow here: it would be compiled apart
        outer = TorchDataParallel._active_ddp_module
        try:
            # torch.compile splits the module's graphs at buckets, so that these can be sent during backward.
            if CAN_SPLIT_GRAPHS and self.bucket_bytes_cap >= FIRST_BUCKET_BYTES:  # else torch raises
                TorchDataParallel._active_ddp_module = cast(Any, self)
            outputs = self.module(*inputs, **kwargs)
        finally:
            TorchDataParallel._active_ddp_module = outer
            if self._casts is not None:
                self._casts.restore()  # after a KeyboardInterrupt, too
        if self._syncs_buffers and self._buffer_hook is not None and self._hooks_after_forward:
            self._run_buffer_hook()
        return outputs

    @not_compiled
    def _prepare(self) -> None:
        if self._torch_join is not None:
            if self._torch_join() is not None and self._join_config.enable:
                Join.notify_join_context(cast(Any, self))  # collective, also of ranks that have left the context
                self._set_divisor(True)
            else:  # an exception has ended the context
                self._leave_torch_join()
        if self._in_backward is None:
            self._take_over_optimizers()
        if self._throws_early and torch.is_grad_enabled() and self._combiner.enabled:
            self._check_early_end(True)
        super()._prepare()

    def _is_alone(self) -> bool:
        return self._is_joining or self._torch_join is not None or super()._is_alone()

    def _copy_buffers(self) -> None:
        if self._buffer_hook is None:
            super()._copy_buffers()
        elif not self._hooks_after_forward:
            self._run_buffer_hook()

    @not_compiled
    def _run_buffer_hook(self) -> None:
        assert self._buffer_hook is not None
        self._wait_for_buffers()
        with torch.no_grad():
            self._futures = list(self._buffer_hook(self._named_buffers()) or ())

    def _wait_for_buffers(self) -> None:
        while self._futures:
            self._futures.pop(0).wait()

    def _take_over_optimizers(self) -> None:
        """Have optimizers that step in backward step when the gradients are combined, not in torch's own hooks."""
        self._in_backward = []
        if isinstance(self._combiner, GradSync):
            self._in_backward = [param for _, param in self._named() if hasattr(param, "_in_backward_optimizers")]
            if self._in_backward:
                from torch.distributed.optim.apply_optimizer_in_backward import param_to_optim_hook_handle_map as hooks

                for param in self._in_backward:
                    for handle in hooks.get(param, ()):
                        handle.remove()
            if self._in_backward or self._buffer_hook is not None:
                # A reference to this wrapper, such as that of a hook, would keep it alive.
                self._combiner.after_combining = functools.partial(_end_backward, weakref.ref(self))

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether the next backward combines gradients. `no_sync` sets it."""
        return self._requires_sync

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, required: bool) -> None:
        self._requires_sync = required
        if isinstance(self._combiner, GradSync):
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

    # State dicts and copies

    def state_dict(self, *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        """Return the state of the module, as in torch. See the class about names."""
        if args or destination is not None or prefix:  # this wrapper is a part of another module
            return super().state_dict(*args, destination=destination, prefix=prefix, keep_vars=keep_vars)
        state = WrappedState()
        state._metadata = {}
        super().state_dict(destination=state, keep_vars=keep_vars)
        state._wrapped_names = frozenset(state)
        return state

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        with_prefix(self.module, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        return "" if self._combiner.is_in_world else "in no world before its gradients are first combined"

    def __getstate__(self) -> dict[str, Any]:
        if self._process_set is not global_process_set:
            raise RuntimeError(
                "`process_group` must be the whole world to copy or pickle a wrapper, but is another process set "
                "instead. Copy its `module`."
            )
        return {name: value for name, value in self.__dict__.items() if name not in self._of_this_rank}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._process_set = global_process_set
        self._enter()
        self._combine_gradients(self._named(), compares_late=True)

    # Uneven inputs

    @contextlib.contextmanager
    def join(
        self, divide_by_initial_world_size: bool = True, enable: bool = True, throw_on_early_termination: bool = False
    ) -> Iterator[None]:
        """Train with different numbers of batches: a rank that leaves the `with` block still takes part for the others.

        It contributes zeros to their backward passes. Buffers are not broadcast in the block. At the end every rank has
        the parameters and buffers of the rank that left last. The state of an optimizer, such as momentum, and of a
        GradScaler stays each rank's own: see docs/training.md. Collective over the world.

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
            raise ValueError("`process_group` must be the whole world for join(), but is another process set instead.")
        self._is_joining, self._throws_early = True, throws
        self._combiner.divide_by(None if by_all else "active")
        try:
            yield
            self._check_early_end(False)
            self._overwrite(join())
        finally:
            self._combiner.divide_by(None)
            self._is_joining = self._throws_early = False

    def join_hook(self, **kwargs: Any) -> Any:
        """Return what torch.distributed.algorithms.Join calls on a rank without more data."""
        by_all = kwargs.get("divide_by_initial_world_size", True)
        self._divides_by_active = not flag("divide_by_initial_world_size", by_all)

        hook = _JoinHook(self)
        self._torch_join = weakref.ref(hook)
        return hook

    def _set_divisor(self, is_active: bool) -> None:
        if self._divides_by_active:
            self._combiner.divide_by(self._reduced(int(is_active), Sum, "join.active"))

    def _leave_torch_join(self) -> None:
        self._torch_join, self._join_config = None, DistributedDataParallel._join_config
        self._combiner.divide_by(None)

    def _check_early_end(self, is_active: bool) -> None:
        """With `throw_on_early_termination`, raise RuntimeError if only some ranks have more data. Then collective."""
        if self._throws_early and 0 < self._reduced(int(is_active), Sum, "join.active") < size():
            raise RuntimeError("Detected at least one rank that exhausted inputs. Throwing across all ranks.")

    def _reduced(self, number: int, op: int, name: str) -> int:
        """Return the reduction of each rank's `number`. Collective."""
        own = torch.tensor([number], device="cpu")
        return int(allreduce(own, op=op, name=name, process_set=self._process_set))

    def _overwrite(self, root_rank: int) -> None:
        """Overwrite parameters and buffers with those of rank `root_rank`. Collective."""
        buffers = self._named_buffers() if self.forward_sync_buffers else {}
        self._broadcast(dict(self._named()) | buffers, root_rank)

    # Names of torch's class that programs and frameworks use

    _set_params_and_buffers_to_ignore_for_model: Any = staticmethod(
        TorchDataParallel._set_params_and_buffers_to_ignore_for_model
    )
    _get_data_parallel_params: Any = staticmethod(TorchDataParallel._get_data_parallel_params)
    _register_fused_optim: Any = TorchDataParallel._register_fused_optim
    join_device, join_process_group = TorchDataParallel.join_device, TorchDataParallel.join_process_group

    _join_config: Any = SimpleNamespace(enable=False, throw_on_early_termination=False, is_first_joinable=False)
    """Which Join context of torch is active: none. The context sets it."""

    reducer = SimpleNamespace(
        prepare_for_forward=lambda: None, prepare_for_backward=lambda outputs: None, _rebuild_buckets=lambda: False
    )
    """What frameworks call on torch's Reducer before a backward that must average. It has nothing to do here."""

    broadcast_bucket_size = 250 << 20
    """In bytes. torch's functions that copy modules to all ranks take it."""

    @property
    def process_group(self) -> Any:
        """The `process_group` that was passed. By default torch's group of the world, else the global process set."""
        if self._process_group is not None:
            return self._process_group
        if self.device_mesh is not None:
            return self.device_mesh.get_group(mesh_dim=0)
        return world_group() or global_process_set

    @property
    def broadcast_buffers(self) -> bool:
        """The same as `forward_sync_buffers`."""
        return self.forward_sync_buffers

    @broadcast_buffers.setter
    def broadcast_buffers(self, value: bool) -> None:
        self.forward_sync_buffers = value

    use_side_stream_for_tensor_copies = False
    """Inputs are moved on the current stream."""

    @property
    def named_module_buffers(self) -> dict[str, torch.Tensor]:
        """The buffers that are synchronized, by their names in the module."""
        return self._named_buffers()

    @property
    def modules_buffers(self) -> list[torch.Tensor]:
        """The buffers that are synchronized."""
        return list(self._named_buffers().values())

    def will_sync_module_buffers(self) -> bool:
        """Return whether forwards in training mode synchronize buffers. Local."""
        return self.forward_sync_buffers and bool(self._named_buffers())

    @property
    def require_manual_backward_finalization(self) -> bool:
        """False: gradients are complete when backward returns. Raises RuntimeError when it is set to True."""
        return False

    @require_manual_backward_finalization.setter
    def require_manual_backward_finalization(self, required: bool) -> None:
        if required:
            self.finalize_backward()

    should_finalize_after_backward = False
    """There is nothing to finalize."""

    def finalize_backward(self) -> None:
        """Raise RuntimeError: gradients are complete when backward returns."""
        raise RuntimeError(
            "`require_manual_backward_finalization` must be False, since gradients are complete when backward returns. "
            "Leave it and finalize_backward() out."
        )

    def _check_reducer_finalized(self) -> None:
        """Accepted as in torch, without effect: gradients are complete when backward returns."""

    def _set_static_graph(self) -> None:
        """Accepted as in torch, without effect."""
        self.static_graph = True

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        """Return facts about this wrapper by torch's names. Local."""
        return logged_facts(self, self._combiner.comm_hook)

    def register_comm_hook(self, state: object, hook: Callable[[Any, Any], Any]) -> None:
        """Combine gradients by a communication hook, as in torch, on any backend; see docs/training.md. Collective.

        The hook gets `state` and a bucket of gradients, which it must divide by the number of ranks itself. Raises
        CollectiveMismatchError when the ranks register different hooks, RuntimeError when one is registered already or
        `mixed_precision` was passed.
        """
        if self.mixed_precision is not None:  # in torch it is a hook itself
            raise RuntimeError(
                "A communication hook must not be registered with `mixed_precision`, which reduces gradients itself."
            )
        with reporting(DATA_PARALLEL, self._process_set):
            checked = needed("comm_hook")((state, hook))
        self._combiner.register_comm_hook(checked)

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        """Combine gradients by a built-in hook of torch. Collective. Raises as `register_comm_hook`."""
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        kinds = torch.distributed.BuiltinCommHookType
        hooks = {kinds.ALLREDUCE: default_hooks.allreduce_hook, kinds.FP16_COMPRESS: default_hooks.fp16_compress_hook}
        if comm_hook_type not in hooks:
            raise TypeError(
                f"`comm_hook_type` must be one of {[str(known) for known in hooks]}, but is {comm_hook_type!r} instead."
            )

        def hook(state: Any, bucket: Any) -> Any:
            return hooks[comm_hook_type](state, bucket)

        hook.__qualname__ = str(comm_hook_type)
        self.register_comm_hook(None, hook)

    def _register_buffer_comm_hook(self, state: Any, hook: Any, comm_hook_location: Any = None) -> None:
        """Synchronize buffers by `hook` instead of copying rank 0's, as in torch. Collective.

        hook(state, buffers) gets the buffers by their names in the module, and changes them in place. It may return a
        list of futures, which backward waits for. It is called in the forwards that would copy buffers.
        comm_hook_location: a _BufferCommHookLocation of torch; None: after forward.
        """
        rule = "a function of a state and a dict of buffers"
        if not callable(hook):
            raise wrong("hook", rule, hook, "Pass a function.", TypeError)
        self._hooks_after_forward = comm_hook_location is None or comm_hook_location.name == "POST_FORWARD"
        self._buffer_hook = functools.partial(hook, state)
        self._in_backward = None  # the next forward lets backward wait for the futures

    def _default_broadcast_coalesced(
        self, bufs: Any = None, bucket_size: Any = None, authoritative_rank: int = 0
    ) -> None:
        """Copy buffers of a member of the process group to the others, for hooks. Collective.

        bufs: the tensors; None: all buffers. bucket_size: without effect.
        """
        buffers = self._named_buffers().values() if bufs is None else bufs
        named = {f"buffer {place}": buffer for place, buffer in enumerate(buffers)}
        self._broadcast(named, (self._process_set.ranks or [0])[authoritative_rank])

    def _remove_autograd_hooks(self) -> None:
        """Stop averaging gradients: remove this wrapper's hooks from the parameters, as in torch. Local."""
        self._combiner.release()
        self._combiner = Combiner()

    def _set_ddp_sink_clone(self, val: bool) -> None:
        """Accepted as in torch, without effect: outputs are never cloned."""

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> list[str]:
        """What the constructor of torch's wrapper asks its module, as where Accelerate wraps this one again.

        Both average then, which changes no number: the second average is of equal gradients.
        """
        if self._process_set is not global_process_set:
            raise TypeError(
                "`module` must not be distributed already over another process set than the whole world, but is. Pass "
                "the bare model to what wraps it."
            )
        if isinstance(self._combiner, GradSync):
            self._combiner.share()
        return [f"module.{name}" for name in self.parameters_to_ignore]


class _JoinHook(JoinHook):
    """What torch's Join context calls on a rank without more data."""

    def __init__(self, wrapper: DistributedDataParallel) -> None:
        self._wrapper = wrapper

    def main_hook(self) -> None:
        self._wrapper._set_divisor(False)
        self._wrapper._combiner.shadow()

    def post_hook(self, is_last_joiner: bool) -> None:
        wrapper = self._wrapper
        wrapper._overwrite(wrapper._reduced(rank() if is_last_joiner else -1, Max, "join.last"))
        wrapper._leave_torch_join()


def _end_backward(reference: weakref.ref[DistributedDataParallel]) -> None:
    """Wait for buffers, and step the optimizers that step in backward."""
    wrapper = reference()
    if wrapper is None:
        return
    wrapper._wait_for_buffers()
    for param in wrapper._in_backward or ():
        for optimizer in cast(Any, param)._in_backward_optimizers:
            optimizer.step()
        param.grad = None


# isinstance() for torch's class and its base Joinable, which are ABCs.
TorchDataParallel.register(DistributedDataParallel)
