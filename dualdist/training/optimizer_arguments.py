"""The arguments of DistributedOptimizer: their checks, the names of parameters, and groups that are sent together."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from ..agreement import call_kinds
from ..checks import instance, integer, is_dtensor, items, number, reduce_op, wrong
from ..collectives.compression import Compression, checked_compression
from ..gradients.adasum_step import are_steps_combined
from ..gradients.grad_sync import combined_elsewhere, combined_twice
from ..gradients.options import SyncOptions
from ..types import REDUCE_OP_NAMES, Adasum, Average, Sum
from .torch_sync_batch_norm import check_sync_batch_norms, layers_with

__all__ = (
    "check_hook_alone",
    "check_model",
    "check_optimizer",
    "check_overlap",
    "grouped",
    "named_in",
    "numbered",
)


def check_optimizer(
    optimizer: Any, op: Any, gradient_predivide_factor: Any, compression: Any
) -> tuple[int, float, Any]:
    """Return the op, the factor and the compressor, converted. Raises ValueError or TypeError as in Horovod."""
    fix = "Pass one that is made with the model's parameters."
    instance("optimizer", optimizer, torch.optim.Optimizer, "a torch.optim.Optimizer", fix)
    try:
        optimizer.register_step_pre_hook(lambda *_: None).remove()
    except AttributeError:
        name = type(optimizer).__name__
        raise TypeError(
            f"`optimizer` must have been initialized by torch.optim.Optimizer, but {name}.__init__ does not call "
            f"super().__init__(). Wrap the optimizer inside it: {name}(DistributedOptimizer(inner))."
        ) from None
    op = reduce_op(op)
    if op not in (Average, Sum, Adasum):
        raise ValueError(
            f"`op` must be Average, Sum or Adasum for an optimizer, but is {REDUCE_OP_NAMES[op]} instead."
        )
    factor = number("gradient_predivide_factor", gradient_predivide_factor)
    if factor != 1.0 and op != Average:
        raise ValueError(
            f"`gradient_predivide_factor` must be 1 unless `op` is Average, but is {factor} instead."
        )
    if factor == 0:
        raise ValueError("`gradient_predivide_factor` must be a number to divide by, but is 0 instead.")
    return op, factor, checked_compression(compression)


def check_model(params: Sequence[torch.Tensor]) -> None:
    """Raise TypeError or ValueError if the model with these parameters cannot be trained by a distributed optimizer."""
    if any(map(is_dtensor, params)):
        raise TypeError(
            "`optimizer` must have plain parameters, but has DTensors. Use it without a wrapper: models that "
            "fully_shard or parallelize_module has changed exchange gradients themselves."
        )
    if any(hasattr(param, "_fsdp_flattened") for param in params):
        raise TypeError(
            "`optimizer` must have plain parameters, but has those of a FullyShardedDataParallel, of which each rank "
            "has another part. Use it without a wrapper: the model exchanges gradients itself."
        )
    other = combined_elsewhere(params, call_kinds.OPTIMIZER)
    if other is not None:
        raise TypeError(
            f"`optimizer` must not have parameters of a {other}, but does. Use either style, not both for one model."
        )
    check_sync_batch_norms(layers_with(params))


def check_overlap(params: Sequence[torch.Tensor], options: SyncOptions) -> None:
    """Raise ValueError if another optimizer combines gradients of `params`, too, and that would change them again."""
    name = combined_twice(params, options)
    if name is None and are_steps_combined(params):
        name = "one of them"
    if name is not None:
        raise ValueError(
            f"`optimizer` must not have parameters of another DistributedOptimizer unless both average, but has "
            f"{name!r}, whose gradient would be combined twice. Delete the other one, or use op=Average without a hook."
        )


def check_hook_alone(op: int, factor: float, compression: Any) -> None:
    """Raise ValueError if options are set that a communication hook replaces."""
    if (op, factor, compression) != (Average, 1.0, Compression.none):
        raise ValueError(
            "`op`, `gradient_predivide_factor` and `compression` must not be set with `comm_hook`, but are. The hook "
            "decides how gradients are combined."
        )


def named_in(optimizer: torch.optim.Optimizer, named_parameters: Any) -> list[tuple[str, torch.Tensor]]:
    """Return the optimizer's parameters with their names, in the optimizer's order. Raises ValueError as in Horovod."""
    own = [param for group in optimizer.param_groups for param in group["params"]]
    if named_parameters is None:
        return [entry for place in range(len(optimizer.param_groups)) for entry in numbered(optimizer, place)]
    rule, fix = "a sequence of tuples (name, parameter)", "Pass model.named_parameters()."
    named = items("named_parameters", named_parameters, rule, fix)
    if any(not isinstance(entry, tuple) or len(entry) != 2 for entry in named):
        raise ValueError(f"`named_parameters` must be {rule}, but has other entries instead. {fix}")
    names = [name for name, _ in named]
    for place, name in enumerate(names):
        if not isinstance(name, str):
            raise wrong(f"named_parameters[{place}]", "a name and a parameter", name, fix)
    repeated = (
        sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
    )
    if repeated:
        raise ValueError(
            f"`named_parameters` must not repeat names, but has {', '.join(repeated)} more than once."
        )
    name_of = {id(param): name for name, param in named}
    unnamed = [tuple(param.shape) for param in own if id(param) not in name_of]
    if unnamed:
        raise ValueError(
            f"`named_parameters` must name every parameter of the optimizer, but {len(unnamed)} are missing "
            f"(shapes {unnamed[:5]}). Pass the named_parameters() of all the modules it optimizes."
        )
    return [(name_of[id(param)], param) for param in own]


def numbered(optimizer: torch.optim.Optimizer, number: int) -> list[tuple[str, torch.Tensor]]:
    """Return the parameters of the group at index `number` with names made of numbers."""
    params = optimizer.param_groups[number]["params"]
    return [(f"group{number}.{place}", param) for place, param in enumerate(params)]


def grouped(groups: Any, num_groups: Any, params: Sequence[torch.Tensor]) -> list[list[int]] | None:
    """Return groups of parameter indices; None: by size. Raises ValueError as in Horovod."""
    fix = "Pass the number of groups, or lists of parameters."
    num_groups = integer("num_groups", num_groups, least=0, fix="Use `groups` instead.")
    asked = groups if groups is not None else num_groups or None
    if asked is None:
        return None
    if isinstance(asked, int) and not isinstance(asked, bool):
        if asked <= 0:
            raise ValueError(
                f"`groups` must be a positive number or lists of parameters, but is {asked} instead."
            )
        size, remainder = divmod(len(params), asked)
        ends = [0]
        for place in range(min(asked, len(params))):
            ends.append(ends[-1] + size + (place < remainder))
        return [list(range(start, end)) for start, end in itertools.pairwise(ends) if end > start]
    if not isinstance(asked, list | tuple) or any(not isinstance(group, list | tuple) for group in asked):
        raise wrong("groups", "a positive number or a list of lists of parameters", asked, fix)
    if any(not isinstance(param, torch.Tensor) for group in asked for param in group):
        raise ValueError(f"`groups` must hold parameters, but holds something else. {fix}")
    place_of = {id(param): index for index, param in enumerate(params)}
    members = [[place_of[id(param)] for param in group if id(param) in place_of] for group in asked]
    flat = [index for group in members for index in group]
    if len(set(flat)) != len(flat):
        raise ValueError("`groups` must hold every parameter at most once, but one is in several groups.")
    return [group for group in members if group]
