"""DistributedOptimizer: an optimizer with the combined gradients of all ranks.

The optimizer stays the same object; only its class becomes a subclass with Horovod's extra methods. State, schedulers,
isinstance and pickling therefore still work. Gradients are complete when `backward()` returns. What remains is done in
torch's hooks before and after `step()`, which also run when a scheduler has patched `step`.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast

import torch

from ..checks import reduce_op
from ..collectives.compression import Compression, Compressor
from ..collectives.reduction import Reduction
from ..gradients.adasum_step import AdasumStep
from ..gradients.combiner import Combiner, NullCombiner
from ..gradients.grad_sync import GradSync
from ..gradients.options import SyncOptions
from ..types import REDUCE_OP_NAMES, Adasum, Average, Op, Sum
from ..world.process_sets import ProcessSet, global_process_set

__all__ = ("DistributedOptimizer", "SynchronizedOptimizer")


class SynchronizedOptimizer(torch.optim.Optimizer):
    """The type that `DistributedOptimizer` returns: a subclass of the optimizer's class. Not created directly."""

    _combiner: Combiner
    _base: type[torch.optim.Optimizer]
    _skipping: bool

    def synchronize(self) -> None:
        """Combine gradients that backward left uncombined. Usually there are none.

        Collective when there are any, as after fewer backward passes than `backward_passes_per_step`.
        """
        self._combiner.synchronize()

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Make `step()` use the gradients as they are. For programs that call `synchronize()` themselves."""
        self._combiner.check_skippable()
        self._skipping = True
        try:
            yield
        finally:
            self._skipping = False

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Set how many backward passes accumulate locally before gradients are combined."""
        self._combiner.set_passes(_at_least_one(passes))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, as in torch; from then on their gradients are combined too. Collective."""
        super().add_param_group(param_group)
        try:
            self._combiner.add(_numbered(self, len(self.param_groups) - 1))
        except BaseException:
            del self.param_groups[-1]
            raise
        self._combiner.fill()

    def __reduce__(self) -> Any:
        """Pickle and copy as the original class, without hooks. The copy trains alone until it is wrapped again."""
        return _restore, (self._base, self.__getstate__())


def _restore(base: type[torch.optim.Optimizer], state: dict[str, Any]) -> torch.optim.Optimizer:
    optimizer = base.__new__(base)
    optimizer.__setstate__(state)
    return optimizer


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None = None,
    compression: type[Compressor] = Compression.none,
    backward_passes_per_step: int = 1,
    op: Op = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[torch.Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> SynchronizedOptimizer:
    """Make `optimizer` combine gradients over the ranks, and return it.

    Gradients are complete when `backward()` returns: clip, unscale or inspect them as in one process. A closure for
    LBFGS must return the mean of the ranks' losses (`hvd.allreduce(loss.detach())`), because LBFGS uses the loss to
    decide when to stop. Collective: every member of `process_set` must call it with the same parameters; other ranks
    train alone.

    Args:
        optimizer: any torch optimizer, new or with state; it is changed and returned.
        named_parameters: `model.named_parameters()`; names are used in errors. None: numbered.
        compression: `Compression.fp16` or `bf16` to send fewer bytes.
        backward_passes_per_step: how many backward passes accumulate (as a sum) before gradients are combined.
        op: Average, Sum, or Adasum, which combines the steps instead of the gradients; or SUM or AVG of
            torch.distributed.ReduceOp.
        gradient_predivide_factor: divides before the sum, and multiplies after it; for Average.
        num_groups: deprecated, use `groups`.
        groups: parameters that are sent together: a number of groups, or lists of parameters. None: by size.
        sparse_as_dense: send sparse gradients as dense ones.

    Raises:
        ValueError: an argument is wrong on this rank.
        TypeError: `optimizer` is distributed already.
        CollectiveMismatchError: the parameters or options differ between ranks.
    """
    op = reduce_op(op)
    _check(optimizer, op, gradient_predivide_factor, compression)
    passes = _at_least_one(backward_passes_per_step)
    named = _named_parameters(optimizer, named_parameters)
    members = _groups(groups if groups is not None else num_groups or None, [param for _, param in named])
    combiner: Combiner = NullCombiner()
    if process_set.included() and op == Adasum:
        combiner = AdasumStep(optimizer, compression, process_set)
    elif process_set.included():
        reduction = Reduction(op, 1.0 / gradient_predivide_factor, gradient_predivide_factor)
        options = SyncOptions(reduction, compression, process_set, sparse_as_dense, groups=members)
        combiner = GradSync(named, options, optimizer, passes)
    combiner.fill()  # as Horovod does: scripts may read gradients before the first backward
    base = type(optimizer)
    optimizer.__class__ = type(base.__name__, (SynchronizedOptimizer, base), {"__module__": __name__})
    synchronized = cast("SynchronizedOptimizer", optimizer)
    synchronized._base, synchronized._skipping, synchronized._combiner = base, False, combiner
    optimizer.register_step_pre_hook(_before_step)
    optimizer.register_step_post_hook(_after_step)
    return synchronized


def _check(
    optimizer: torch.optim.Optimizer, op: int, gradient_predivide_factor: float, compression: Any
) -> None:
    if isinstance(optimizer, SynchronizedOptimizer):
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
        raise ValueError(
            f"`op` must be Average, Sum or Adasum for an optimizer, but is {REDUCE_OP_NAMES[op]} instead."
        )
    if not (hasattr(compression, "compress") and hasattr(compression, "decompress")):
        raise ValueError(
            f"`compression` must be Compression.none, fp16 or bf16, but is {compression!r} instead."
        )


def _before_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    closure = args[1] if len(args) > 1 else kwargs.get("closure")  # args[0] is the optimizer
    if optimizer._skipping:
        return
    if closure is None:  # a closure calls backward, which combines
        optimizer._combiner.synchronize()
    optimizer._combiner.before_step()


def _after_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    optimizer._combiner.after_step()


def _at_least_one(passes: int) -> int:
    if passes <= 0:
        raise ValueError(f"`backward_passes_per_step` must be at least 1, but is {passes} instead.")
    return passes


def _named_parameters(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None
) -> list[tuple[str, torch.Tensor]]:
    """Return the optimizer's parameters with their names, in the optimizer's order. Raises ValueError as in Horovod."""
    own = [param for group in optimizer.param_groups for param in group["params"]]
    if named_parameters is None:
        return [
            entry for number in range(len(optimizer.param_groups)) for entry in _numbered(optimizer, number)
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
            f"(shapes {unnamed[:5]}). Pass the named_parameters() of all the modules it optimizes."
        )
    return [(name_of[id(param)], param) for param in own]


def _numbered(optimizer: torch.optim.Optimizer, number: int) -> list[tuple[str, torch.Tensor]]:
    """Return the parameters of the group at index `number` with names made of numbers."""
    params = optimizer.param_groups[number]["params"]
    return [(f"group{number}.{place}", param) for place, param in enumerate(params)]


def _groups(asked: Any, params: Sequence[torch.Tensor]) -> list[list[int]] | None:
    """Return groups of parameter indices; None: by size. Raises ValueError as in Horovod."""
    if asked is None:
        return None
    if isinstance(asked, int):
        if asked <= 0:
            raise ValueError(
                f"`groups` must be a positive number or lists of parameters, but is {asked} instead."
            )
        size, remainder = divmod(len(params), asked)
        ends = [0]
        for number in range(min(asked, len(params))):
            ends.append(ends[-1] + size + (number < remainder))
        return [list(range(start, end)) for start, end in itertools.pairwise(ends) if end > start]
    if not isinstance(asked, list | tuple) or any(not isinstance(group, list | tuple) for group in asked):
        raise ValueError(
            f"`groups` must be a positive number or a list of lists of parameters, but is {type(asked).__name__} "
            "instead."
        )
    place = {id(param): index for index, param in enumerate(params)}
    members = [[place[id(param)] for param in group if id(param) in place] for group in asked]
    flat = [index for group in members for index in group]
    if len(set(flat)) != len(flat):
        raise ValueError("`groups` must hold every parameter at most once, but one is in several groups.")
    return [group for group in members if group]
