"""The names of horovod.torch beside the public functions: autograd functions, optimizers, and private names of scripts.

The optimizers have Horovod's attributes. Scripts read the private ones, which are read-only here.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable
from types import MappingProxyType
from typing import Any, cast

import torch

import dualdist

from ..core.collectives.reduction import Compression, Compressor
from ..core.gradients.grad_sync import GradSync
from ..core.training.optimizer import SynchronizedOptimizer, named_in, subclass_of
from ..core.types import Adasum, Op
from ..core.world import ProcessSet
from ..sync_batch_norm import SyncBatchNorm

__all__ = (
    "_NULL",
    "_SYNC_BN_V2",
    "_SYNC_BN_V3",
    "_SYNC_BN_V4",
    "DistributedOptimizer",
    "FP16Compressor",
    "HorovodAllgather",
    "HorovodAllreduce",
    "HorovodAlltoall",
    "HorovodBroadcast",
    "HorovodGroupedAllgather",
    "HorovodGroupedAllreduce",
    "HorovodGroupedReducescatter",
    "HorovodReducescatter",
    "NoneCompressor",
    "_DistributedAdasumOptimizer",
    "_DistributedOptimizer",
    "_SyncBatchNorm",
)

_NULL = ""
NoneCompressor, FP16Compressor = Compression.none, Compression.fp16

# Autograd functions: `apply` has the parameters of Horovod's `forward`, the tensors included.


def _function(call: Callable[..., Any], *parameters: str) -> Any:
    """Return the class for `call`. The tensors of a grouped call follow its parameters."""

    @classmethod  # type: ignore[misc]
    def apply(cls: type, *args: Any) -> Any:
        given = dict(zip(parameters, args, strict=False))
        if "tensor" in parameters:
            return call(given.pop("tensor"), **given)
        return tuple(call(list(args[len(parameters) :]), **given))

    name = f"Horovod{call.__name__.title().replace('_', '')}"
    doc = f"The differentiable `{call.__name__}`, as an autograd function."
    return type(name, (torch.autograd.Function,), {"apply": apply, "__doc__": doc, "__module__": __name__})


_scaled = ("prescale_factor", "postscale_factor")
_average = ("average", "name", "op", *_scaled, "process_set")
_scatter = ("name", "op", "process_set", *_scaled)
HorovodAllreduce = _function(dualdist.allreduce, "tensor", *_average)
HorovodGroupedAllreduce = _function(dualdist.grouped_allreduce, *_average)
HorovodAllgather = _function(dualdist.allgather, "tensor", "name", "process_set")
HorovodGroupedAllgather = _function(dualdist.grouped_allgather, "name", "process_set")
HorovodBroadcast = _function(dualdist.broadcast, "tensor", "root_rank", "name", "process_set")
HorovodAlltoall = _function(dualdist.alltoall, "tensor", "splits", "name", "process_set")
HorovodReducescatter = _function(dualdist.reducescatter, "tensor", *_scatter)
HorovodGroupedReducescatter = _function(dualdist.grouped_reducescatter, *_scatter)


# Optimizers.


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
        tracked = self._combiner.passes_of() if isinstance(self._combiner, GradSync) else {}
        passes = self.backward_passes_per_step
        return MappingProxyType({param: passes - tracked.get(param, 0) for param in self._parameter_names})

    def synchronize(self) -> None:
        super().synchronize()
        self._synchronized = True

    def set_backward_passes_per_step(self, passes: int) -> None:
        super().set_backward_passes_per_step(passes)
        self.backward_passes_per_step = passes


class _DistributedAdasumOptimizer(_DistributedOptimizer):
    """The class of optimizers that `DistributedOptimizer(op=Adasum)` has wrapped."""


_PARAMETERS = inspect.signature(dualdist.DistributedOptimizer)


@functools.wraps(dualdist.DistributedOptimizer)
def DistributedOptimizer(*args: Any, **kwargs: Any) -> _DistributedOptimizer:
    given = _PARAMETERS.bind(*args, **kwargs)
    given.apply_defaults()
    options = given.arguments
    if options["named_parameters"] is not None:
        options["named_parameters"] = list(options["named_parameters"])  # read twice
    wrapped = dualdist.DistributedOptimizer(*given.args, **given.kwargs)
    kind = _DistributedAdasumOptimizer if options["op"] == Adasum else _DistributedOptimizer
    wrapped.__class__ = subclass_of(type(wrapped), kind, "horovod.torch.optimizer")
    result = cast("_DistributedOptimizer", wrapped)
    names = named_in(wrapped, options["named_parameters"])
    result._parameter_names = MappingProxyType({param: name for name, param in names})
    result._compression = options["compression"]
    result._groups = options["groups"] if options["groups"] is not None else options["num_groups"] or None
    for name in ("op", "gradient_predivide_factor", "sparse_as_dense", "process_set", "backward_passes_per_step"):
        setattr(result, name, options[name])
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


# Synchronized batch normalization.

_SYNC_BN_V2, _SYNC_BN_V3, _SYNC_BN_V4 = False, True, True
"""What Horovod finds for every torch that dualdist supports."""


class _SyncBatchNorm(torch.autograd.Function):
    """The normalization of SyncBatchNorm in training, as an autograd function over all ranks."""

    @classmethod
    def apply(
        cls,
        input: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        running_mean: torch.Tensor | None,
        running_var: torch.Tensor | None,
        eps: float,
        momentum: float | None,
    ) -> Any:
        """Return the normalized `input`, and update the running statistics. Collective."""
        layer = SyncBatchNorm(
            input.shape[1], eps, momentum, affine=False, track_running_stats=running_mean is not None, device="meta"
        )
        layer.running_mean, layer.running_var = running_mean, running_var
        normalized = layer(input)
        shape = [1, -1] + [1] * (input.dim() - 2)
        scaled = normalized if weight is None else normalized * weight.view(shape)
        return scaled if bias is None else scaled + bias.view(shape)
