"""What torch's DistributedDataParallel offers besides training: attributes, names of the state, and facts for logs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ..backends.torch_interface import torch_data_parallel, world_group
from ..world.process_sets import global_process_set
from .parallel_logging import logging_data
from .state_names import WrappedState, with_prefix

__all__ = ("TorchInterface",)


class TorchInterface(torch.nn.Module):
    """The part of DistributedDataParallel that programs and frameworks know from torch's class."""

    module: torch.nn.Module
    device: torch.device
    device_mesh: Any
    forward_sync_buffers: bool
    static_graph: bool
    _process_group: Any

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
