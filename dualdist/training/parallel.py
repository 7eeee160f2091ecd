"""DistributedDataParallel: a module that averages its gradients over all ranks, with torch's interface, on any backend.

GradSync combines the gradients, as for DistributedOptimizer. The wrapper adds what belongs to a module: equal
parameters at the start, equal buffers before each forward, and state dicts without "module." in the names, so that a
checkpoint fits with and without the wrapper.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from ..agreement import call_kinds
from ..checks import flag, instance, items, number
from ..collectives.compression import Compression
from ..collectives.join import join
from ..collectives.reduction import Reduction
from ..gradients.combiner import Combiner, NullCombiner
from ..gradients.grad_sync import GradSync
from ..gradients.options import SyncOptions
from ..types import Average
from ..world.process_sets import ProcessSet, check_process_set, global_process_set, reporting
from .compiling import not_compiled
from .devices import checked_device
from .parameters import broadcast_parameters

__all__ = ("DistributedDataParallel",)

_PREFIX = "module."


class DistributedDataParallel(torch.nn.Module):
    """Averages the gradients of `module` over the ranks in every backward.

    Gradients are complete when `backward()` returns. Parameters that some or all ranks do not use need no option.
    Use either this or DistributedOptimizer, not both. Collective: every member of `process_group` must call it with
    the same parameters; on other ranks the module trains alone.

    Args:
        module: any module; its parameters and buffers are overwritten with those of the first member of the set.
        device_ids: [device] to move tensors among the inputs to. None: they stay where they are.
        broadcast_buffers: overwrite buffers with those of the first member before each forward in training mode.
        init_sync: False leaves parameters and buffers as they are.
        process_group: the ranks that average, as a process set. None: all ranks.
        bucket_cap_mb: how many MiB of gradients are sent at once. None: 25.
        output_device, dim, find_unused_parameters, check_reduction, gradient_as_bucket_view, static_graph: accepted as
            in torch (torch/nn/parallel/distributed.py), without effect: unused parameters are always found, and
            gradients are always views of the buckets.

    Raises:
        CollectiveMismatchError: the parameters differ between ranks in number, name, shape or dtype.
        TypeError: an argument is of a wrong type, or `module` is distributed already.
        ValueError: `bucket_cap_mb` is not positive.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        device_ids: Sequence[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        dim: int = 0,
        broadcast_buffers: bool = True,
        init_sync: bool = True,
        process_group: ProcessSet | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
    ) -> None:
        super().__init__()
        with reporting(call_kinds.DATA_PARALLEL, process_group):  # the other ranks must not wait for this one
            device = _check(module, device_ids, process_group, bucket_cap_mb)
            broadcast_buffers = flag("broadcast_buffers", broadcast_buffers)
            init_sync = flag("init_sync", init_sync)
        self.module = module
        self.broadcast_buffers = broadcast_buffers
        self._device = device
        self._process_set = process_group if process_group is not None else global_process_set
        self._combiner: Combiner = NullCombiner()
        self._joining = False
        self._wrapped = {id(param): param for param in module.parameters()}
        self._record_parts()
        if self._process_set.included():
            if init_sync:
                self._broadcast({**dict(module.named_parameters()), **dict(module.named_buffers())})
            options = SyncOptions(
                Reduction(Average),
                Compression.none,
                self._process_set,
                bucket_cap_mb=bucket_cap_mb,
                owner=call_kinds.DATA_PARALLEL,
            )
            self._combiner = GradSync(list(module.named_parameters()), options, self)
        self.register_state_dict_post_hook(_without_prefix)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(_with_prefix)  # type: ignore[no-untyped-call]

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the module. Collective in training mode while gradients are enabled, when it has buffers."""
        if self._device is not None:
            inputs, kwargs = tree_map_only(torch.Tensor, self._to_device, (inputs, kwargs))
        self._prepare()
        return self.module(*inputs, **kwargs)

    @not_compiled
    def _prepare(self) -> None:
        """Make buffers equal, and check that the parameters are still those that were wrapped."""
        if not self._combiner.enabled or not torch.is_grad_enabled():
            return
        self._combiner.watch()
        is_changed = _identities(self._parts) != self._recorded
        if is_changed:
            self._record_parts()
        has_buffers = any(part._buffers for part in self._parts)
        if has_buffers and self.broadcast_buffers and self.training and not self._joining:
            self._broadcast(dict(self.module.named_buffers()))
        if not is_changed:
            return
        for name, param in self.module.named_parameters():
            if id(param) not in self._wrapped:
                self._combiner.refuse(f"{name!r} is now a different parameter")

    def _record_parts(self) -> None:
        self._parts = list(self.module.modules())
        self._recorded = _identities(self._parts)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raise TypeError: a copy would train alone."""
        raise TypeError(
            "DistributedDataParallel must not be copied or pickled, since it belongs to this world. "
            "Copy its `module`, or save its state_dict()."
        )

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients locally in the `with` block. The next backward averages the accumulated gradients."""
        with self._combiner.disabled():
            yield

    @contextlib.contextmanager
    def join(self, divide_by_initial_world_size: bool = True, enable: bool = True) -> Iterator[None]:
        """Train with different numbers of batches: a rank that leaves the `with` block still takes part for the others.

        It contributes zeros to their backward passes, and averages still divide by the size of the world. Buffers are
        not broadcast in the block. At the end every rank has the parameters and buffers of the rank that left last.
        Collective over the world.

        Args:
            divide_by_initial_world_size: must be True, torch's default.
            enable: False: do nothing.

        Raises ValueError when `divide_by_initial_world_size` is False or `process_group` is not the whole world.
        """
        enable = flag("enable", enable)
        if not flag("divide_by_initial_world_size", divide_by_initial_world_size):
            raise ValueError(
                "`divide_by_initial_world_size` must be True, but is False instead. Scale the loss instead."
            )
        if enable and self._process_set is not global_process_set:
            raise ValueError(
                "`process_group` must be the whole world for join(), but is another process set instead."
            )
        self._joining = enable
        try:
            yield
        finally:
            self._joining = False
        if enable:
            last = join()
            named = {**dict(self.module.named_parameters()), **dict(self.module.named_buffers())}
            self._broadcast(named, last)

    def _broadcast(self, named: dict[str, torch.Tensor], root_rank: int | None = None) -> None:
        if named:
            ranks = self._process_set.ranks
            root_rank = (ranks[0] if ranks else 0) if root_rank is None else root_rank
            broadcast_parameters(named, root_rank, process_set=self._process_set)

    def _to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self._device, non_blocking=True)


def _without_prefix(wrapper: Any, state_dict: dict[str, Any], prefix: str, metadata: Any) -> None:
    for key in [key for key in state_dict if key.startswith(prefix + _PREFIX)]:
        state_dict[prefix + key[len(prefix + _PREFIX) :]] = state_dict.pop(key)


def _with_prefix(wrapper: Any, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Accept names with torch's prefix "module." and names without it."""
    own = wrapper.module.state_dict().keys()
    for key in [key for key in state_dict if key.startswith(prefix)]:
        name = key[len(prefix) :]
        if name in own or not name.startswith(_PREFIX):
            state_dict[prefix + _PREFIX + name] = state_dict.pop(key)


def _check(module: Any, device_ids: Any, process_group: Any, bucket_cap_mb: Any) -> torch.device | None:
    """Return the device in `device_ids`. Raises TypeError or ValueError for a wrong argument."""
    instance("module", module, torch.nn.Module, "a torch.nn.Module", "Pass the model.")
    if any(isinstance(part, DistributedDataParallel) for part in module.modules()):
        raise TypeError(
            "`module` must not be distributed already, but it or a part of it is. Wrap the whole model once."
        )
    if process_group is not None:
        check_process_set(process_group, "process_group", registered=True)
    if bucket_cap_mb is not None:
        number("bucket_cap_mb", bucket_cap_mb, above=0, fix="Pass None for 25.")
    rule, fix = "a list of one device or None", "Pass [hvd.device()]."
    devices = items("device_ids", () if device_ids is None else device_ids, rule, fix)
    if len(devices) > 1:
        raise ValueError(f"`device_ids` must be {rule}, but has {len(devices)} instead. {fix}")
    return checked_device("device_ids[0]", devices[0]) if devices else None


def _identities(parts: Sequence[torch.nn.Module]) -> list[int]:
    """Return the ids of the parameters and modules in `parts`; this is cheaper than named_parameters()."""
    return [
        id(value)
        for part in parts
        for members in (part._parameters, part._modules)
        for value in members.values()
    ]
