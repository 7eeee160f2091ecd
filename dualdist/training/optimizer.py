"""DistributedOptimizer: an optimizer whose gradients are those of all ranks.

The optimizer that is given stays the object it is: only its class becomes a subclass with Horovod's extra methods. So
its state, its schedulers, isinstance and pickling survive. Gradients are complete when `backward()` returns; hooks
before and after `step()` (torch's own, which also run under a scheduler's patched `step`) do what is left.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from ..collectives.compression import Compression, Compressor
from ..collectives.reduce import Reduction
from ..gradients.adasum_step import AdasumStep
from ..gradients.grad_sync import GradSync
from ..gradients.options import SyncOptions
from ..types import Adasum, Average, Sum
from ..world.process_sets import ProcessSet, global_process_set

__all__ = ("DistributedOptimizer",)


class _Distributed(torch.optim.Optimizer):
    """What a distributed optimizer can do beyond its own class. Never made by itself."""

    _sync: Any
    _base: type[torch.optim.Optimizer]
    _skipping: bool

    def synchronize(self) -> None:
        """Combine what backward has left over; nothing when the gradients are complete, which they are after backward.

        Collective when something is left, as after fewer backwards than `backward_passes_per_step`.
        """
        self._sync.finish()

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Make `step()` leave the gradients as they are. For recipes that call `synchronize()` themselves."""
        self._sync.check_skippable()
        self._skipping = True
        try:
            yield
        finally:
            self._skipping = False

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Set how many backwards accumulate locally before gradients are combined."""
        self._sync.set_passes(_at_least_one(passes))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, as in torch; their gradients are combined from now on. Collective."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        number = len(self.param_groups) - 1
        try:
            self._sync.add([(f"group{number}.{place}", param) for place, param in enumerate(group["params"])])
        except BaseException:
            del self.param_groups[-1]
            raise
        self._sync.fill()

    def __reduce__(self) -> Any:
        """Pickle and copy as the optimizer without its hooks: it belongs to no world until it is wrapped again."""
        return _revive, (self._base, self.__getstate__())


def _revive(base: type[torch.optim.Optimizer], state: dict[str, Any]) -> torch.optim.Optimizer:
    optimizer = base.__new__(base)
    optimizer.__setstate__(state)
    return optimizer


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None = None,
    compression: type[Compressor] = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[torch.Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> torch.optim.Optimizer:
    """Make `optimizer` combine gradients over the ranks, and return it.

    Gradients are complete when `backward()` returns: clip them, unscale them, look at them as in one process. A closure
    for LBFGS must return the mean of the ranks' losses (`hvd.allreduce(loss.detach())`), by which it decides to go on.
    Collective: every member of `process_set` must call it with the same parameters; other ranks step by themselves.

    Args:
        optimizer: any torch optimizer, new or with state; it is changed and returned.
        named_parameters: `model.named_parameters()`; names are used in errors. None: numbered.
        compression: `Compression.fp16` or `bf16` to send fewer bytes.
        backward_passes_per_step: how many backwards accumulate (as a sum) before gradients are combined.
        op: Average, Sum, or Adasum, which combines the steps instead of the gradients.
        gradient_predivide_factor: divides before the sum, and multiplies after it; for Average.
        num_groups: deprecated, use `groups`.
        groups: parameters that are sent together: a number of groups, or lists of parameters. None: by size.
        sparse_as_dense: send sparse gradients as dense ones.

    Raises:
        ValueError: an argument is wrong on this rank. TypeError: `optimizer` is distributed already.
        CollectiveMismatchError: the parameters or options differ between ranks.
    """
    if isinstance(optimizer, _Distributed):
        raise TypeError(
            f"`optimizer` must not be distributed already, but is {type(optimizer).__name__} instead."
        )
    if gradient_predivide_factor != 1.0 and op != Average:
        raise ValueError(
            f"`gradient_predivide_factor` must be 1 unless `op` is Average, but is "
            f"{gradient_predivide_factor} instead."
        )
    if gradient_predivide_factor == 0:
        raise ValueError("`gradient_predivide_factor` must be a number to divide by, but is 0 instead.")
    if op not in (Average, Sum, Adasum):
        raise ValueError(f"`op` must be Average, Sum or Adasum for an optimizer, but is {op!r} instead.")
    if not (hasattr(compression, "compress") and hasattr(compression, "decompress")):
        raise ValueError(
            f"`compression` must be Compression.none, fp16 or bf16, but is {compression!r} instead."
        )
    passes = _at_least_one(backward_passes_per_step)
    named = _named_parameters(optimizer, named_parameters)
    members = _groups(groups if groups is not None else num_groups or None, [param for _, param in named])
    reduction = Reduction(op, 1.0 / gradient_predivide_factor, gradient_predivide_factor)
    sync: Any = _Alone()
    if process_set.included() and op == Adasum:
        sync = AdasumStep(optimizer, compression, passes, process_set)
    elif process_set.included():
        options = SyncOptions(reduction, compression, passes, process_set, sparse_as_dense)
        sync = GradSync(named, options, optimizer, members)
        sync.fill()  # as Horovod does: scripts may read gradients before the first backward
    base = type(optimizer)
    optimizer.__class__ = type(base.__name__, (_Distributed, base), {"__module__": __name__})
    distributed: Any = optimizer
    distributed._base, distributed._skipping, distributed._sync = base, False, sync
    optimizer.register_step_pre_hook(_before_step)
    optimizer.register_step_post_hook(_after_step)
    return optimizer


class _Alone:
    """Stands in for GradSync on a rank outside the process set: it steps by itself."""

    def finish(self) -> None: ...
    def fill(self) -> None: ...
    def stepped(self) -> None: ...
    def check_skippable(self) -> None: ...
    def set_passes(self, passes: int) -> None: ...
    def add(self, named: Any) -> None: ...


def _before_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    closure = args[1] if len(args) > 1 else kwargs.get("closure")  # args[0] is the optimizer
    if optimizer._skipping:
        return
    if closure is None:  # a closure calls backward, which combines
        optimizer._sync.finish()
    optimizer._sync.fill()


def _after_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    optimizer._sync.stepped()


def _at_least_one(passes: int) -> int:
    if passes <= 0:
        raise ValueError(f"`backward_passes_per_step` must be at least 1, but is {passes} instead.")
    return passes


def _named_parameters(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None
) -> list[tuple[str, torch.Tensor]]:
    """Return the optimizer's parameters with their names, in its own order. Raises ValueError as Horovod does."""
    own = [param for group in optimizer.param_groups for param in group["params"]]
    if named_parameters is None:
        return [
            (f"group{number}.{place}", param)
            for number, group in enumerate(optimizer.param_groups)
            for place, param in enumerate(group["params"])
        ]
    named = list(named_parameters)
    if any(not isinstance(entry, tuple) for entry in named):
        raise ValueError(
            "`named_parameters` must be a sequence of tuples (name, parameter), usually model.named_parameters()."
        )
    names = [name for name, _ in named]
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
            f"(shapes {unnamed[:5]}). Give the named_parameters() of all the modules it optimizes."
        )
    return [(name_of[id(param)], param) for param in own]


def _groups(asked: Any, params: Sequence[torch.Tensor]) -> list[list[int]] | None:
    """Return groups of parameter indices, None to lay them out by size. Raises ValueError as Horovod does."""
    if asked is None:
        return None
    if isinstance(asked, int):
        if asked <= 0:
            raise ValueError(
                f"`groups` must be a positive number or lists of parameters, but is {asked} instead."
            )
        size, more = divmod(len(params), asked)
        ends = [0]
        for number in range(min(asked, len(params))):
            ends.append(ends[-1] + size + (number < more))
        return [list(range(start, end)) for start, end in itertools.pairwise(ends) if end > start]
    if not isinstance(asked, list | tuple) or any(not isinstance(group, list | tuple) for group in asked):
        raise ValueError("`groups` must be a positive number or lists of parameters, but is of another kind.")
    place = {id(param): index for index, param in enumerate(params)}
    members = [[place[id(param)] for param in group if id(param) in place] for group in asked]
    flat = [index for group in members for index in group]
    if len(set(flat)) != len(flat):
        raise ValueError("`groups` must hold every parameter at most once, but one is in several groups.")
    return [group for group in members if group]
