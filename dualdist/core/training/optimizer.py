"""DistributedOptimizer: an optimizer with the combined gradients of all ranks.

The optimizer stays the same object; only its class becomes a subclass with Horovod's extra methods. State, schedulers,
isinstance and pickling therefore still work. Gradients are complete when `backward()` returns. What remains is done in
torch's hooks before and after `step()`, which also run when a scheduler has patched `step`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, cast

import torch
from torch.utils.hooks import RemovableHandle

from .. import extension, needed
from ..agreement.call import remember_call_site
from ..checks import flag, instance, integer, is_dtensor, items, mapping, number, wrong
from ..collectives.reduction import Compression, Compressor, Reduction, checked_compression, reduce_op
from ..compiling import not_compiled
from ..gradients.combiner import OPTIMIZER, Combiner, Named, SyncOptions, combiners_of
from ..gradients.grad_sync import GradSync
from ..types import REDUCE_OP_NAMES, Adasum, Average, Op, Sum
from ..world import ProcessSetLike, checked_process_set, global_process_set, reporting


class SynchronizedOptimizer(torch.optim.Optimizer):
    """The type that `DistributedOptimizer` returns: a subclass of the optimizer's class. Not created directly."""

    _combiner: Combiner
    _base: type[torch.optim.Optimizer]
    _options: SyncOptions
    _step_hooks: list[RemovableHandle]
    _skipping: bool
    _is_copy: bool

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Raise TypeError: neither this class nor an object of it is initialized like the optimizer's own class."""
        raise _initialized_again(self)

    @not_compiled
    def synchronize(self) -> None:
        """Combine gradients that backward left uncombined. Usually there are none.

        Parameters that no rank used get zeros, as in `step()`. Collective when there are gradients to combine, as after
        fewer backward passes than `backward_passes_per_step`.
        """
        self._combiner.synchronize()
        self._combiner.fill_unused()

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Accumulate gradients locally in the `with` block, as DistributedDataParallel.no_sync.

        The next backward combines the accumulated gradients.
        """
        return self._combiner.disabled()

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
        fix = "It is the new `backward_passes_per_step`."
        self._combiner.set_passes(integer("passes", passes, least=1, fix=fix))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, as in torch; from then on their gradients are combined too. Collective."""
        if "_combiner" not in vars(self) or self._step_hooks[0].hooks_dict_ref() is None:
            raise _initialized_again(self)  # by its own class: new dictionaries of hooks
        instance("param_group", param_group, dict, "a dictionary")
        mapping("param_group", param_group, "params", fix="Pass the parameters to add, and options.")
        super().add_param_group(param_group)
        try:
            self._combiner.add(_numbered(self, len(self.param_groups) - 1))
        except BaseException:
            del self.param_groups[-1]
            raise

    def __reduce__(self) -> Any:
        """Pickle and copy. A copy belongs to no world until its gradients are first combined, which is collective.

        Raises RuntimeError with a `comm_hook`, whose state cannot be copied, or with a `process_set` of some ranks.
        """
        if self._options.process_set is not global_process_set or self._options.comm_hook is not None:
            raise RuntimeError(
                "A DistributedOptimizer with a `comm_hook`, or with a `process_set` other than the whole world, must "
                "not be copied or pickled, but is. Save its state_dict()."
            )
        options = {
            field.name: getattr(self._options, field.name)
            for field in dataclasses.fields(SyncOptions)
            if field.name not in ("process_set", "kind")  # known by identity, and always the same
        }
        return _restore, (self._base, self.__getstate__(), options, self._combiner.passes)


def _initialized_again(optimizer: SynchronizedOptimizer) -> TypeError:
    name = type(optimizer).__name__
    return TypeError(
        f"`{name}` must be initialized before it is distributed, but is initialized by its distributed class instead. "
        f"Make another one by DistributedOptimizer({name}(...)), with the class of the optimizer that was wrapped. "
        "To forget the state only, call optimizer.state.clear()."
    )


def _restore(
    base: type[torch.optim.Optimizer], state: dict[str, Any], options: dict[str, Any], passes: int
) -> torch.optim.Optimizer:
    optimizer = base.__new__(base)
    optimizer.__setstate__(state)
    full = SyncOptions(process_set=global_process_set, **options)
    return _distributed(optimizer, named_in(optimizer, None), full, passes, compares_late=True)


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
    process_set: ProcessSetLike = global_process_set,
    comm_hook: Any = None,
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
        comm_hook: a communication hook as for torch's DistributedDataParallel.register_comm_hook, or a tuple (state,
            hook). It combines each bucket instead of the allreduce, and divides; see docs/training.md. Its name must be
            equal on all ranks. Without the other options about how gradients are combined.

    Raises:
        ValueError: an argument is wrong on this rank, the model has a torch.nn.SyncBatchNorm that cannot work, or
            another optimizer would combine the same gradients once more.
        TypeError: an argument is of a wrong type, or `optimizer` or its model is distributed already.
        CollectiveMismatchError: between ranks, names, shapes or dtypes of the parameters differ, or arguments of this
            function, or the class of `optimizer`.
    """
    with reporting(OPTIMIZER, process_set):  # the other ranks must not wait for this one
        # Ranks outside a set train alone, so that they would not notice that it is not registered.
        process_set = checked_process_set(process_set, registered=True)
        op, factor, compression = _check_optimizer(optimizer, op, gradient_predivide_factor, compression)
        if isinstance(optimizer, SynchronizedOptimizer) and not optimizer._is_copy:
            raise TypeError(
                f"`optimizer` must not be distributed already, but is {type(optimizer).__name__} instead. Wrap it once."
            )
        passes = integer("backward_passes_per_step", backward_passes_per_step, least=1)
        sparse_as_dense = flag("sparse_as_dense", sparse_as_dense)
        hook = None if comm_hook is None else needed("comm_hook")(comm_hook)
        if hook is not None and (op, factor, compression) != (Average, 1.0, Compression.none):
            raise ValueError(
                "`op`, `gradient_predivide_factor` and `compression` must not be set with `comm_hook`, but are. The "
                "hook decides how gradients are combined."
            )
        named = named_in(optimizer, named_parameters)
        _check_model([param for _, param in named])
        members = _grouped(groups, num_groups, [param for _, param in named])
        if isinstance(optimizer, SynchronizedOptimizer):
            _undistributed(optimizer)
        options = SyncOptions(
            reduction=Reduction(op, 1.0 / factor, factor),
            compression=compression,
            process_set=process_set,
            sparse_as_dense=sparse_as_dense,
            groups=members,
            comm_hook=hook,
            optimizer=type(optimizer).__name__,
        )
        _check_overlap(named, options)
    remember_call_site()
    return _distributed(optimizer, named, options, passes)


def _distributed(
    optimizer: torch.optim.Optimizer, named: Named, options: SyncOptions, passes: int, *, compares_late: bool = False
) -> SynchronizedOptimizer:
    """Change `optimizer` so that it combines gradients, and return it. compares_late: as for GradSync."""
    combiner = Combiner()
    if options.process_set.included() and options.reduction.op == Adasum:
        combiner = needed("adasum").AdasumStep(optimizer, options.compression, options.process_set)
    elif options.process_set.included():
        owned = dataclasses.replace(options, owner=weakref.ref(optimizer))
        combiner = GradSync(named, owned, optimizer, passes, compares_late=compares_late)
        combiner.after_combining = functools.partial(_hook_steps, weakref.ref(optimizer))
    combiner.fills = not isinstance(optimizer, torch.optim.SparseAdam)
    base = type(optimizer)
    optimizer.__class__ = subclass_of(base, SynchronizedOptimizer, __name__)
    synchronized = cast("SynchronizedOptimizer", optimizer)
    synchronized._base, synchronized._skipping, synchronized._combiner = base, False, combiner
    synchronized._options, synchronized._is_copy = options, compares_late
    synchronized._step_hooks = []
    _hook_steps(lambda: synchronized)
    return synchronized


def _hook_steps(reference: Callable[[], Any]) -> None:
    """Let `step()` call `_before_step` and `_after_step`, also after a script has removed these hooks."""
    if (optimizer := reference()) is None:
        return
    hooks = optimizer._step_hooks
    if not hooks or any(hook.id not in (hook.hooks_dict_ref() or ()) for hook in hooks):
        for hook in hooks:
            hook.remove()
        pre, post = optimizer.register_step_pre_hook, optimizer.register_step_post_hook
        optimizer._step_hooks = [pre(_before_step), post(_after_step)]


def subclass_of(base: type, kind: type, module: str) -> Any:
    """Return a subclass of `base` and `kind` in which the methods of `kind` come first.

    `base` is its first base all the same: an object can only get a class whose first base has the same memory layout,
    and that of `class Name(ABC, Optimizer)` is not the layout of `kind`.
    """
    order = [*(cls for cls in kind.__mro__ if cls not in base.__mro__), *base.__mro__]

    def mro(cls: type) -> list[type]:
        # Subclasses of the new class have this metaclass, too. They get the usual order.
        return [cls, *order] if cls.__bases__ == (base, kind) else super(metaclass, cls).mro()

    metaclass: Any = type(type(base).__name__, (type(base),), {"mro": mro})
    return metaclass(base.__name__, (base, kind), {"__module__": module})


def _undistributed(optimizer: SynchronizedOptimizer) -> None:
    """Make `optimizer` the plain one again."""
    optimizer._combiner.release()
    for handle in optimizer._step_hooks:
        handle.remove()
    optimizer.__class__ = optimizer._base  # type: ignore[assignment]


@not_compiled
def _before_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    remember_call_site()
    closure = args[1] if len(args) > 1 else kwargs.get("closure")  # args[0] is the optimizer
    optimizer._combiner.check(optimizer.param_groups)
    if optimizer._skipping:
        return
    if closure is None:  # a closure calls backward, which combines
        optimizer._combiner.synchronize()
    optimizer._combiner.before_step()


@not_compiled
def _after_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    optimizer._combiner.after_step()


# Arguments: their checks, the names of parameters, and groups that are sent together.


def _check_optimizer(
    optimizer: Any, op: Any, gradient_predivide_factor: Any, compression: Any
) -> tuple[int, float, Any]:
    """Return the op, the factor and the compressor, converted. Raises ValueError or TypeError as in Horovod."""
    fix = "Pass torch.optim.SGD(model.parameters(), lr=0.1), for example. DistributedDataParallel takes a model."
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
        raise ValueError(f"`op` must be Average, Sum or Adasum for an optimizer, but is {REDUCE_OP_NAMES[op]} instead.")
    factor = number("gradient_predivide_factor", gradient_predivide_factor)
    if factor != 1.0 and op != Average:
        raise ValueError(f"`gradient_predivide_factor` must be 1 unless `op` is Average, but is {factor} instead.")
    if factor == 0:
        raise ValueError("`gradient_predivide_factor` must be a number to divide by, but is 0 instead.")
    return op, factor, checked_compression(compression)


def _check_model(params: Sequence[torch.Tensor]) -> None:
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
    for other in combiners_of(params):
        if other.kind is not OPTIMIZER:
            raise TypeError(
                f"`optimizer` must not have parameters of a {other.kind}, but does. Use either style, not both for one "
                "model."
            )
    if (batch_norm := extension("batch_norm")) is not None:
        batch_norm.check_layers(batch_norm.layers_with(params))


def _check_overlap(named: Named, options: SyncOptions) -> None:
    """Raise ValueError if another optimizer combines some of these gradients, too, and that would change them again."""
    for other in combiners_of([param for _, param in named]):
        if options.can_repeat and other.can_repeat:
            continue
        own = set(map(id, other.params()))
        name = next(name for name, param in named if id(param) in own)
        raise ValueError(
            f"`optimizer` must not have parameters of another DistributedOptimizer unless both average, but has "
            f"{name!r}, whose gradient would be combined twice. Delete the other one, or use op=Average without a hook."
        )


def named_in(optimizer: torch.optim.Optimizer, named_parameters: Any) -> list[tuple[str, torch.Tensor]]:
    """Return the optimizer's parameters with their names, in the optimizer's order. Raises ValueError as in Horovod."""
    own = [param for group in optimizer.param_groups for param in group["params"]]
    if named_parameters is None:
        return [entry for place in range(len(optimizer.param_groups)) for entry in _numbered(optimizer, place)]
    rule, fix = "a sequence of tuples (name, parameter)", "Pass model.named_parameters()."
    named = items("named_parameters", named_parameters, rule, fix)
    if any(not isinstance(entry, tuple) or len(entry) != 2 for entry in named):
        raise ValueError(f"`named_parameters` must be {rule}, but has other entries instead. {fix}")
    names = [name for name, _ in named]
    for place, name in enumerate(names):
        if not isinstance(name, str):
            raise wrong(f"named_parameters[{place}]", "a name and a parameter", name, fix)
    if len(set(names)) < len(names):
        repeated = sorted({name for name in names if names.count(name) > 1})
        raise ValueError(f"`named_parameters` must not repeat names, but has {', '.join(repeated)} more than once.")
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


def _grouped(groups: Any, num_groups: Any, params: Sequence[torch.Tensor]) -> list[list[int]] | None:
    """Return groups of parameter indices; None: by size. Raises ValueError as in Horovod."""
    fix = "Pass the number of groups, or lists of parameters."
    num_groups = integer("num_groups", num_groups, least=0, fix="Use `groups` instead.")
    asked = groups if groups is not None else num_groups or None
    if asked is None:
        return None
    if isinstance(asked, int) and not isinstance(asked, bool):
        if asked <= 0:
            raise ValueError(f"`groups` must be a positive number or lists of parameters, but is {asked} instead.")
        parts = torch.arange(len(params), device="cpu").tensor_split(max(1, min(asked, len(params))))
        return [part.tolist() for part in parts if len(part)]
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
