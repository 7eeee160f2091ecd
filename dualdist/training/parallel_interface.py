"""What torch's DistributedDataParallel offers besides training: attributes, names of the state, and facts for logs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ..agreement import call_kinds
from ..backends.torch_interface import (
    builtin_comm_hook,
    register_fused_optimizer,
    torch_data_parallel,
    world_group,
)
from ..gradients.combiner import Combiner, NullCombiner
from ..gradients.comm_hook import checked_comm_hook
from ..world.process_sets import ProcessSet, global_process_set, reporting
from .parallel_buffers import BufferHook, checked_buffer_hook
from .parallel_logging import logging_data
from .state_names import WrappedState, with_prefix

__all__ = ("TorchInterface",)


class TorchInterface(torch.nn.Module):
    """The part of DistributedDataParallel that programs and frameworks know from torch's class."""

    module: torch.nn.Module
    device: torch.device
    device_mesh: Any
    forward_sync_buffers: bool
    mixed_precision: Any
    static_graph: bool
    _process_group: Any
    _process_set: ProcessSet
    _combiner: Combiner = NullCombiner()
    _buffer_hook: BufferHook | None
    _in_backward: list[torch.Tensor] | None
    _broadcast: Callable[..., None]
    _named: Callable[[], list[tuple[str, torch.nn.Parameter]]]
    _named_buffers: Callable[[], dict[str, torch.Tensor]]

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

    @property
    def should_finalize_after_backward(self) -> bool:
        """False: there is nothing to finalize."""
        return False

    def finalize_backward(self) -> None:
        """Raise RuntimeError: gradients are complete when backward returns."""
        raise RuntimeError(
            "`require_manual_backward_finalization` must be False, since gradients are complete when backward returns. "
            "Leave it and finalize_backward() out."
        )

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        """Accepted as in torch, without effect: no times are logged. hvd.start_timeline() records them."""

    def _check_reducer_finalized(self) -> None:
        """Accepted as in torch, without effect: gradients are complete when backward returns."""

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(
        module: torch.nn.Module, params_and_buffers_to_ignore: Sequence[str]
    ) -> None:
        """Leave parameters and buffers with these names in `module` alone: neither copied nor averaged. As in torch."""
        own: Any = torch_data_parallel()
        own._set_params_and_buffers_to_ignore_for_model(module, params_and_buffers_to_ignore)

    @staticmethod
    def _get_data_parallel_params(module: torch.nn.Module, named_params: bool = False) -> Iterator[Any]:
        """Return the parameters of `module` that are not left alone. As in torch."""
        own: Any = torch_data_parallel()
        yield from own._get_data_parallel_params(module, named_params)

    def _set_static_graph(self) -> None:
        """Accepted as in torch, without effect."""
        self.static_graph = True

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        """Return the facts about this wrapper that torch's method of this name returns, as far as they exist here."""
        return logging_data(self)

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
        with reporting(call_kinds.DATA_PARALLEL, self._process_set):
            checked = checked_comm_hook((state, hook))
        if checked is not None:
            self._combiner.register_comm_hook(checked)

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        """Combine gradients by a built-in hook of torch. Collective. Raises as `register_comm_hook`."""
        self.register_comm_hook(None, builtin_comm_hook(comm_hook_type))

    def _register_fused_optim(self, optim: type, *args: Any, optim_params: Any = None, **kwargs: Any) -> None:
        """Have an optimizer of class `optim` step in backward, in a communication hook. As in torch. Collective."""
        register_fused_optimizer(self, optim, *args, optim_params=optim_params, **kwargs)

    def _register_buffer_comm_hook(self, state: Any, hook: Any, comm_hook_location: Any = None) -> None:
        """Synchronize buffers by `hook` instead of copying rank 0's, as in torch. Collective.

        hook(state, buffers) gets the buffers by their names in the module, and changes them in place. It may return a
        list of futures, which backward waits for. It is called in the forwards that would copy buffers.
        comm_hook_location: a _BufferCommHookLocation of torch; None: after forward.
        """
        self._buffer_hook = checked_buffer_hook(state, hook, comm_hook_location)
        self._in_backward = None  # the next forward lets backward wait for the futures

    def _default_broadcast_coalesced(
        self, bufs: Any = None, bucket_size: Any = None, authoritative_rank: int = 0
    ) -> None:
        """Copy buffers of a member of the process group to the others, for hooks. Collective.

        bufs: the tensors; None: all buffers. bucket_size: without effect.
        """
        buffers = self._named_buffers().values() if bufs is None else bufs
        named = {f"buffer {place}": buffer for place, buffer in enumerate(buffers)}
        ranks = self._process_set.ranks or [0]
        self._broadcast(named, ranks[authoritative_rank])

    def _remove_autograd_hooks(self) -> None:
        """Stop averaging gradients: remove this wrapper's hooks from the parameters, as in torch. Local."""
        self._combiner.release()
        self._combiner = NullCombiner()

    def _set_ddp_sink_clone(self, val: bool) -> None:
        """Accepted as in torch, without effect: outputs are never cloned."""

    @property
    def reducer(self) -> Any:
        """What frameworks call on torch's Reducer before a backward that must average. It has nothing to do here."""
        return _NoReducer()

    @property
    def join_device(self) -> torch.device:
        """The device of the parameters."""
        return self.device

    @property
    def join_process_group(self) -> Any:
        """The process group, for torch.distributed.algorithms.Join."""
        return self.process_group

    def state_dict(
        self, *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False
    ) -> Any:
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

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> Any:
        """Refuse another wrapper around this one: torch's constructor reads this attribute of its module first."""
        raise TypeError(
            "`module` must not be distributed already, but is a dualdist.DistributedDataParallel. Pass "
            "the bare model to what wraps it, or in Accelerate use prepare_model(model, evaluation_mode=True)."
        )


class _NoReducer:
    """Has the methods of torch's Reducer that frameworks call. dualdist decides in backward whether to combine."""

    def prepare_for_forward(self) -> None:
        pass

    def prepare_for_backward(self, outputs: Sequence[torch.Tensor]) -> None:
        pass

    def _rebuild_buckets(self) -> bool:
        return False
