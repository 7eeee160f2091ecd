"""A module that averages its gradients over all ranks, on any backend.

GradSync combines the gradients, as for DistributedOptimizer. The wrapper adds what belongs to a module: equal
parameters at the start, and equal buffers before each forward. dualdist/torch_ddp/ gives it the interface of torch's
DistributedDataParallel, with state dicts and copies.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel as TorchDataParallel

from .. import extension
from ..agreement.call import Data, Kind, remember_call_site
from ..checks import instance, is_dtensor
from ..collectives.reduction import Compression, Compressor, Reduction
from ..compiling import not_compiled
from ..gradients.combiner import OPTIMIZER, Combiner, SyncOptions, combiners_of
from ..gradients.grad_sync import GradSync
from ..types import Average
from ..world import ProcessSet, global_process_set, reporting
from .parameters import broadcast_parameters

DATA_PARALLEL = Kind("DistributedDataParallel", "DISTRIBUTEDDATAPARALLEL", Data.NONE)
"""Compares the layout of the gradients when a module is wrapped."""


class SynchronizedModule(torch.nn.Module):
    """Averages the gradients of `module` over the ranks in every backward.

    Collective: every member of `process_group` must make it with the same parameters; on other ranks the module trains
    alone.

    Args:
        module: any module; its parameters and buffers are overwritten with those of the first member of the set.
        process_group: the ranks that average.
        ignored: names of parameters and buffers that stay each rank's own.
        named: what `checked_module` has returned; None: it is called here.
        init_sync: False leaves parameters and buffers as they are.
        copies_first: whether buffers are overwritten at the start, too.
        forward_sync_buffers: whether they are before each forward in training mode with gradients enabled. Other
            forwards are not collective: one rank may evaluate alone.
        compression: how gradients are sent.
        bucket_cap_mb, groups: as in SyncOptions.

    Raises:
        CollectiveMismatchError: the parameters differ between ranks in number, name, shape or dtype.
        TypeError, ValueError, RuntimeError: as `checked_module`.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        process_group: ProcessSet = global_process_set,
        *,
        ignored: Collection[str] = (),
        named: Sequence[tuple[str, torch.nn.Parameter]] | None = None,
        init_sync: bool = True,
        copies_first: bool = True,
        forward_sync_buffers: bool = True,
        compression: type[Compressor] = Compression.none,
        bucket_cap_mb: float | None = None,
        groups: Sequence[Sequence[int]] | None = None,
    ) -> None:
        super().__init__()
        if named is None:
            with reporting(DATA_PARALLEL, process_group):  # the other ranks must not wait for this one
                named = checked_module(module, ignored)
        self.module = module
        self.parameters_to_ignore = ignored
        self.forward_sync_buffers = forward_sync_buffers
        self._process_set = process_group
        self._options: dict[str, Any] = {"compression": compression, "bucket_cap_mb": bucket_cap_mb, "groups": groups}
        self._enter()
        if process_group.included():
            if init_sync:
                self._broadcast(dict(named) | (self._named_buffers() if copies_first else {}))
            self._combine_gradients(named, compares_late=False)

    def _enter(self) -> None:
        """Prepare what belongs to this object alone, not to its copies."""
        self._combiner = Combiner()
        self._syncs_buffers = False
        """Whether the current forward synchronizes buffers."""
        self._wrapped = {id(param): param for param in self.module.parameters()}
        self._record_parts()

    def _combine_gradients(self, named: Sequence[tuple[str, torch.nn.Parameter]], compares_late: bool) -> None:
        options = SyncOptions(Reduction(Average), process_set=self._process_set, kind=DATA_PARALLEL, **self._options)
        self._combiner = GradSync(named, options, self, compares_late=compares_late)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the module. Collective in training mode while gradients are enabled, when it has buffers."""
        self._prepare()
        return self.module(*inputs, **kwargs)

    @not_compiled
    def _prepare(self) -> None:
        """Make buffers equal, and check that the parameters are still those that were wrapped."""
        self._syncs_buffers = False
        remember_call_site()
        if not torch.is_grad_enabled():
            return
        self._combiner.watch()
        if not self._combiner.enabled:
            return
        members = _members(self._parts)
        is_changed = len(members) != len(self._recorded) or not all(map(operator.is_, members, self._recorded))
        if is_changed and not any(type(param) is torch.Tensor for param in self.module.parameters()):
            self._record_parts()
        if self.forward_sync_buffers and self.training and not self._is_alone():
            self._syncs_buffers = any(part._buffers for part in self._parts)
        if self._syncs_buffers:
            self._copy_buffers()
        if not is_changed:
            return
        for name, param in self._named():
            # functional_call puts plain tensors in the places of parameters for one forward.
            if id(param) not in self._wrapped and type(param) is not torch.Tensor:
                self._combiner.refuse(f"{name!r} is now a different parameter")

    def _is_alone(self) -> bool:
        """Return whether the other ranks may make no forward now."""
        return not self._combiner.is_in_world

    def _copy_buffers(self) -> None:
        """Make buffers equal before a forward. Collective."""
        self._broadcast(self._named_buffers())

    def _record_parts(self) -> None:
        self._parts = list(self.module.modules())
        self._recorded = _members(self._parts)

    def _named(self) -> list[tuple[str, torch.nn.Parameter]]:
        """Return the parameters whose gradients are averaged, with their names in the module."""
        named = self.module.named_parameters()
        return [(name, param) for name, param in named if name not in self.parameters_to_ignore]

    def _named_buffers(self) -> dict[str, torch.Tensor]:
        named = self.module.named_buffers()
        return {name: buffer for name, buffer in named if name not in self.parameters_to_ignore}

    def _broadcast(self, named: Mapping[str, torch.Tensor], root_rank: int | None = None) -> None:
        """Overwrite tensors with those of a rank; None: of the first member. Collective."""
        if named:
            root_rank = (self._process_set.ranks or [0])[0] if root_rank is None else root_rank
            broadcast_parameters(named, root_rank, process_set=self._process_set)

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Accumulate gradients locally in the `with` block. The next backward averages the accumulated gradients."""
        return self._combiner.disabled()


def _members(parts: Sequence[torch.nn.Module]) -> list[object]:
    """Return the parameters and modules in `parts`; this is cheaper than named_parameters()."""
    members: list[object] = []
    for part in parts:
        members += part._parameters.values()
        members += part._modules.values()
    return members


def checked_module(module: Any, ignored: Collection[str]) -> list[tuple[str, torch.nn.Parameter]]:
    """Return the named parameters of `module` that are not `ignored`.

    Raises TypeError if it is distributed already or has DTensors as parameters, ValueError if it has a
    torch.nn.SyncBatchNorm that cannot work, RuntimeError if no parameter requires a gradient, or one has no shape yet.
    """
    instance("module", module, torch.nn.Module, "a torch.nn.Module", "Pass the model.")
    for part in module.modules():
        if isinstance(part, SynchronizedModule | TorchDataParallel):
            raise TypeError(
                "`module` must not be distributed already, but it or a part of it is. Wrap the whole model once."
            )
        if isinstance(part, torch.nn.DataParallel):
            raise TypeError(
                "`module` must not be a torch.nn.DataParallel or have one, since each process trains on one device, "
                "but it does. Pass its `module` instead."
            )
    named = [(name, param) for name, param in module.named_parameters() if name not in ignored]
    for name, param in named:
        if is_dtensor(param):
            raise TypeError(
                f"`module` must have plain parameters, but {name!r} is a DTensor. Models that fully_shard or "
                "parallelize_module has changed exchange gradients themselves."
            )
        if isinstance(param, torch.nn.parameter.UninitializedParameter):
            raise RuntimeError(
                f"`module` must have initialized parameters, but {name!r} has no shape yet. Run a forward first."
            )
    if not any(param.requires_grad for _, param in named):
        raise RuntimeError(
            "`module` must have a parameter that requires a gradient, but has none. Use it without a wrapper."
        )
    if any(other.kind is OPTIMIZER for other in combiners_of([param for _, param in named])):
        raise TypeError(
            f"`module` must not have parameters of a {OPTIMIZER}, but does. Use either style, not both for one model."
        )
    if (batch_norm := extension("batch_norm")) is not None:
        batch_norm.check_layers(module.modules())
    return named
