"""What torch's DistributedDataParallel offers besides training: attributes, names of the state, and facts for logs."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..agreement import call_kinds
from ..backends.torch_interface import (
    builtin_comm_hook,
    register_fused_optimizer,
    runs_after_forward,
    torch_data_parallel,
    world_group,
)
from ..checks import wrong
from ..gradients.combiner import Combiner, NullCombiner
from ..gradients.comm_hook import checked_comm_hook
from ..world.context import current
from ..world.process_sets import ProcessSet, global_process_set, reporting
from .sync_batch_norm import SyncBatchNorm

# The names in the state dict of a wrapped module.
#
# In memory they are torch's: "module.0.weight", as in the module tree, so that torch.distributed.checkpoint and
# torch.func.functional_call understand them. In files they are those of the bare model, so that a checkpoint of one
# style loads into the other.

PREFIX = "module."


class WrappedState(OrderedDict[str, Any]):
    """The state dict of a wrapped module. Names without "module." are found, too, and are those that pickle writes."""

    _metadata: Mapping[str, Any]
    _wrapped_names: frozenset[str] = frozenset()
    """The names from the wrapper; not those under which others have entered values."""

    def __missing__(self, name: str) -> Any:
        if isinstance(name, str) and super().__contains__(PREFIX + name):
            return self[PREFIX + name]
        raise KeyError(name)

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or (isinstance(name, str) and super().__contains__(PREFIX + name))

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self else default

    def __deepcopy__(self, memo: dict[int, Any]) -> WrappedState:
        made = WrappedState((name, copy.deepcopy(value, memo)) for name, value in self.items())
        made.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as an OrderedDict with the names of the bare model."""
        return _renamed(self, [""], self._wrapped_names.__contains__).__reduce_ex__(protocol)

    def __reduce__(self) -> Any:
        return self.__reduce_ex__(2)


def bare_names(
    module: torch.nn.Module, state: Mapping[str, Any], kind: type[torch.nn.Module]
) -> Mapping[str, Any]:
    """Return `state`, the state dict of `module`, with the names of the model without its wrappers.

    kind: the class of the wrappers, which may be anywhere in `module`.
    """
    wrappers = [
        f"{name}." if name else ""
        for name, part in module.named_modules(remove_duplicate=False)
        if isinstance(part, kind)
    ]
    return _renamed(state, wrappers, lambda name: True) if wrappers else state


def _renamed(
    state: Mapping[str, Any], wrappers: Sequence[str], is_wrapped: Callable[[str], bool]
) -> OrderedDict[str, Any]:
    """Return `state` without the "module." of the wrappers at the prefixes `wrappers`, and its metadata likewise.

    is_wrapped: whether a name has such a prefix at all.
    """

    def rename(name: str) -> str:
        for prefix in wrappers:
            if name.startswith(prefix + PREFIX):
                return prefix + name[len(prefix + PREFIX) :]
        return name

    made: OrderedDict[str, Any] = OrderedDict(
        (rename(name) if is_wrapped(name) else name, value) for name, value in state.items()
    )
    if hasattr(state, "_metadata"):
        versions = {rename(f"{name}.")[:-1]: value for name, value in state._metadata.items()}
        made._metadata = OrderedDict(versions)  # type: ignore[attr-defined]
    return made


def with_prefix(module: torch.nn.Module, state: dict[str, Any], prefix: str) -> None:
    """Rename the entries of `state` for the wrapper at `prefix`, in place: "module." is added where it is missing.

    module: the model in the wrapper, which may have a part of its own that is called "module".
    """
    own: Callable[[str], bool] = set(module.state_dict()).__contains__
    for key in [key for key in state if key.startswith(prefix)]:
        name = key[len(prefix) :]
        if own(name) or not name.startswith(PREFIX):
            state[prefix + PREFIX + name] = state.pop(key)


# Buffers of a DistributedDataParallel: rank 0's are copied to all ranks, or a hook of the user synchronizes them.


@dataclass
class BufferHook:
    """A hook that synchronizes buffers, and its state."""

    hook: Callable[[Any, dict[str, torch.Tensor]], Any]
    """hook(state, buffers) changes the buffers in place. It may return futures."""
    state: Any
    after_forward: bool
    """Whether it is called after forward, not before."""
    _futures: list[Any] = field(default_factory=list)

    def run(self, buffers: Mapping[str, torch.Tensor]) -> None:
        """Call the hook. Collective if the hook is."""
        self.wait()
        with torch.no_grad():
            self._futures = list(self.hook(self.state, dict(buffers)) or ())

    def wait(self) -> None:
        """Wait for the futures that the hook has returned."""
        futures, self._futures = self._futures, []
        for future in futures:
            future.wait()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_futures": []}


def checked_buffer_hook(state: Any, hook: Any, location: Any) -> BufferHook:
    """Return a BufferHook. Raises TypeError."""
    if not callable(hook):
        raise wrong(
            "hook", "a function of a state and a dict of buffers", hook, "Pass a function.", TypeError
        )
    return BufferHook(hook, state, runs_after_forward(location))


# The facts about a wrapper that torch's DistributedDataParallel._get_ddp_logging_data returns.


def logging_data(wrapper: Any) -> dict[str, Any]:
    """Return them by torch's names (torch/csrc/distributed/c10d/logger.cpp). Local."""
    context = current()
    params = [param for _, param in wrapper._named() if param.requires_grad]
    batch_norms = (SyncBatchNorm, torch.nn.SyncBatchNorm)
    hook = wrapper._combiner.comm_hook
    facts = {} if hook is None else {"comm_hook": hook.name}
    return {
        **facts,
        "world_size": context.world.size,
        "rank": context.world.rank,
        "module_name": type(wrapper.module).__name__,
        "device_ids": ", ".join(str(device.index or 0) for device in wrapper.device_ids or ()),
        "output_device": -1 if wrapper.output_device is None else str(wrapper.output_device),
        "backend_name": context.backend.transport,
        "broadcast_buffers": int(wrapper.forward_sync_buffers),
        "bucket_cap_bytes": wrapper.bucket_bytes_cap,
        "find_unused_parameters": int(wrapper.find_unused_parameters),
        "gradient_as_bucket_view": int(wrapper.gradient_as_bucket_view),
        "static_graph": int(wrapper.static_graph),
        "has_sync_bn": int(any(isinstance(part, batch_norms) for part in wrapper.module.modules())),
        "num_parameter_tensors": len(params),
        "total_parameter_size_bytes": sum(param.numel() * param.element_size() for param in params),
        "dtypes": ", ".join(sorted({str(param.dtype).removeprefix("torch.") for param in params})),
        "is_multi_device_module": int(wrapper.is_multi_device_module),
    }


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
