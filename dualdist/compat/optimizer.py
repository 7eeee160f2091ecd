"""The names of horovod.torch.optimizer: DistributedOptimizer, whose optimizers have Horovod's attributes.

Scripts and their tests read the private ones. Here they are read-only, and show what has a meaning in dualdist.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from types import MappingProxyType
from typing import Any, cast

import torch

import dualdist

from ..collectives.compression import Compression, Compressor
from ..training.optimizer import SynchronizedOptimizer, named_in
from ..types import Adasum, Average, Op
from ..world.process_sets import ProcessSet, global_process_set

__all__ = ("DistributedOptimizer", "_DistributedAdasumOptimizer", "_DistributedOptimizer")


class _DistributedOptimizer(SynchronizedOptimizer):
    """The class of all optimizers that `DistributedOptimizer` has wrapped, except for Adasum."""

    _compression: type[Compressor] | Compressor
    _groups: Any
    _parameter_names: MappingProxyType[torch.Tensor, str]
    """Parameter -> its name."""
    op: Op
    gradient_predivide_factor: float
    sparse_as_dense: bool
    process_set: ProcessSet
    backward_passes_per_step: int
    _synchronized = False
    """Whether `synchronize()` was called since the last step."""

    @property
    def _should_synchronize(self) -> bool:
        return not self._skipping

    @property
    def _handles(self) -> MappingProxyType[Any, Any]:
        """Gradients under reduction: always none, because they are complete when `backward()` returns."""
        return MappingProxyType({})

    @property
    def _requires_update(self) -> frozenset[torch.Tensor]:
        """The parameters whose gradients are combined."""
        if not self.process_set.included():
            return frozenset()
        params = (param for group in self.param_groups for param in group["params"])
        return frozenset(param for param in params if param.requires_grad)

    @property
    def _allreduce_delay(self) -> MappingProxyType[torch.Tensor, int]:
        """Parameter -> how many backward passes are left until its gradient is combined."""
        tracked = {id(param.tensor): param.passes for param in getattr(self._combiner, "_params", ())}
        passes = self.backward_passes_per_step
        return MappingProxyType(
            {param: passes - tracked.get(id(param), 0) for param in self._parameter_names}
        )

    def synchronize(self) -> None:
        super().synchronize()
        self._synchronized = True

    def set_backward_passes_per_step(self, passes: int) -> None:
        super().set_backward_passes_per_step(passes)
        self.backward_passes_per_step = passes


class _DistributedAdasumOptimizer(_DistributedOptimizer):
    """The class of optimizers that `DistributedOptimizer(op=Adasum)` has wrapped."""


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None = None,
    compression: type[Compressor] | Compressor = Compression.none,
    backward_passes_per_step: int = 1,
    op: Op = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[torch.Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> _DistributedOptimizer:
    """Wrap `optimizer` as dualdist.DistributedOptimizer does. The result also has Horovod's attributes."""
    if named_parameters is not None and not isinstance(named_parameters, list):
        named_parameters = list(named_parameters)
    wrapped = dualdist.DistributedOptimizer(
        optimizer,
        named_parameters,
        compression,
        backward_passes_per_step,
        op,
        gradient_predivide_factor,
        num_groups,
        groups,
        sparse_as_dense,
        process_set,
    )
    kind = _DistributedAdasumOptimizer if op == Adasum else _DistributedOptimizer
    base = type(wrapped)
    wrapped.__class__ = type(base.__name__, (kind, base), {"__module__": "horovod.torch.optimizer"})
    result = cast("_DistributedOptimizer", wrapped)
    names = named_in(wrapped, named_parameters)
    result._parameter_names = MappingProxyType({param: name for name, param in names})
    result._compression, result._groups = compression, groups if groups is not None else num_groups or None
    result.op, result.gradient_predivide_factor = op, gradient_predivide_factor
    result.sparse_as_dense, result.process_set = sparse_as_dense, process_set
    result.backward_passes_per_step = backward_passes_per_step
    result.register_step_pre_hook(_warn_before_step)
    return result


def _warn_before_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    """Warn as Horovod does of a step that would combine again in Horovod."""
    if optimizer._synchronized and not optimizer._skipping:
        warnings.warn(
            "optimizer.step() called without optimizer.skip_synchronize() context after optimizer.synchronize(). "
            "This can cause training slowdown. You may want to consider using optimizer.skip_synchronize() context if "
            "you use optimizer.synchronize() in your code.",
            stacklevel=4,
        )
    optimizer._synchronized = False
