"""Whether all ranks have equal parameters: compared at the start, after join(), and whenever a script asks."""

from __future__ import annotations

import hashlib
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from .core.checks import flag, integer, is_dtensor, shown_ranks, wrong
from .core.collectives.objects import ALLGATHER_OBJECT, allgather_object
from .core.compiling import not_compiled
from .core.gradients.buckets import TrackedParameter, as_real
from .core.gradients.combiner import SyncOptions
from .core.world import ProcessSetLike, channel_of, global_process_set, reporting
from .errors import ReplicaMismatchError

# Warns when ranks start, or go on after join(), with different parameters or options, which training keeps.
#
# Without broadcast_parameters(), or with another learning rate on one rank, each rank trains a model of its own, and
# losses look normal. The ranks compare checksums when they first combine gradients, and first after join().

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SHOWN = 5
_PART = 1 << 18
"""How many numbers of a tensor are read at a time."""


def warn_of_differences(params: Sequence[TrackedParameter], options: SyncOptions, number: int) -> None:
    """Warn on the first rank of the process set if parameters or hyperparameters differ between ranks. Collective.

    The host waits for the device of the parameters. number: of the reducer.
    """
    optimizer = None if options.owner is None else options.owner()
    tensors = ((repr(param.name), param.tensor.data) for param in params)
    # The bits of other classes cannot be read.
    named: list[tuple[str, Any]] = [(name, data if type(data) is torch.Tensor else None) for name, data in tensors]
    named += _hyperparameters(optimizer).items()
    wrong, _ = _differing(named, options.process_set, f"dualdist.start.{number}", is_quick=True)
    if wrong and channel_of(options.process_set).group.rank == 0:
        more = f" and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        warnings.warn(
            f"The ranks start with different values of {', '.join(wrong[:_SHOWN])}{more}, and will train different "
            "models. Call broadcast_parameters(model.state_dict(), root_rank=0) and broadcast_optimizer_state("
            "optimizer, root_rank=0) before training, and after join() with the rank that it returns as the root. "
            "DUALDIST_COMPARE_START=0 switches this comparison off.",
            UserWarning,
            stacklevel=2,
        )


def _hyperparameters(optimizer: torch.optim.Optimizer | None) -> dict[str, object]:
    """Return the numbers among the options of the parameter groups, such as learning rates, by name."""
    if optimizer is None:
        return {}
    return {
        f"{name} of the parameter groups": [
            value.tolist() if isinstance(value := group.get(name), torch.Tensor) else value
            for group in optimizer.param_groups
            if isinstance(group.get(name), bool | int | float | tuple | torch.Tensor)
        ]
        # load_state_dict() adds `differentiable` to the defaults, and one rank may be the only one that calls it.
        for name in sorted(set(optimizer.defaults).intersection(*optimizer.param_groups) - {"differentiable"})
    }


def _words(data: torch.Tensor) -> torch.Tensor:
    """Return the bits of a dense tensor as integers, ((n,), of its width)."""
    data = as_real(data).contiguous().reshape(-1)
    return data.view(_WORDS[data.element_size()])


# The comparison that a script asks for.

_calls: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()
"""How often each model was to be checked."""


@not_compiled
def check_replicas(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    every: int = 1,
    batch_norm_buffers: bool = True,
    process_set: ProcessSetLike = global_process_set,
) -> None:
    """Raise ReplicaMismatchError unless all ranks have the same bits in `model` and `optimizer`.

    Collective: every member of `process_set` must call it. Call it between steps. It reads all numbers, and gathers one
    checksum of all of them; if these differ, one for each tensor. A model on a GPU makes the host wait for it.

    Args:
        model: its parameters and buffers are compared, of any dtype, also those that are not in its state_dict, and
            which parameters require gradients, and which modules train or evaluate.
        optimizer: its state and its hyperparameters are compared, too.
        every: compare in call 1, 1 + every, 1 + 2 * every, ... for this model; the calls between do nothing.
        batch_norm_buffers: False leaves out the running statistics of normalization layers. Each rank has its own,
            unless they are SyncBatchNorm's: DistributedDataParallel makes them equal only before the next forward.

    Raises:
        ReplicaMismatchError: on all members. It names the first tensor that differs, and the ranks that have other bits
            than most, or which ranks have equal bits if there is no majority.
        TypeError: an argument is of a wrong type, or the model has DTensors, of which each rank has its own part.
        HorovodInternalError: this has failed on another rank, or as for `allgather`.
    """
    with reporting(ALLGATHER_OBJECT, process_set):
        if not isinstance(model, nn.Module):
            raise wrong("model", "a module", model, "Pass the model, bare or wrapped.", TypeError)
        if optimizer is not None and not hasattr(optimizer, "state_dict"):
            fix = "Pass the one that trains the model."
            raise wrong("optimizer", "an optimizer or None", optimizer, fix, TypeError)
        every = integer("every", every, least=1)
        call = _calls.get(model, 0)
        _calls[model] = call + 1
        if call % every:
            return
        named = [*_of_model(model, flag("batch_norm_buffers", batch_norm_buffers)), *_of_optimizer(optimizer)]
    wrong_names, replicas = _differing(named, process_set)
    if not wrong_names:
        return
    first = wrong_names[0]
    members, values = channel_of(process_set).group.ranks, [replica.get(first) for replica in replicas]
    having = {value: [rank for rank, own in zip(members, values, strict=True) if own == value] for value in values}
    most = max(having, key=lambda value: len(having[value]))
    others = [rank for rank in members if rank not in having[most]]
    differ = f"{shown_ranks(others)} of {len(members)} differ{'s' * (len(others) == 1)} from the others"
    if len(others) >= len(having[most]):  # each part may be right
        differ = f"it differs between {' and '.join(map(shown_ranks, having.values()))}"
    what = next(value[0] for value in (most, *values) if value is not None)
    more = f" {len(wrong_names) - 1} more differ, such as {wrong_names[1]!r}." if len(wrong_names) > 1 else ""
    raise ReplicaMismatchError(
        f"{first!r} ({what}) must be the same on all ranks, but {differ}.{more} "
        "Look for what changes the model outside of the optimizer's step on some ranks only, for a missing "
        "broadcast_parameters() or broadcast_optimizer_state(), and for gradients that were not combined."
    )


def _differing(
    named: Sequence[tuple[str, Any]], process_set: ProcessSetLike, call: str | None = None, *, is_quick: bool = False
) -> tuple[list[str], list[dict[str, tuple[str, str]]]]:
    """Return the names of what differs between ranks, and what and which digest each rank has under every name.

    Collective. call: the name of the collectives. is_quick: as for `_digest`.
    """
    with reporting(ALLGATHER_OBJECT, process_set):
        own = _digest(named, is_quick=is_quick)
    # What differs is a question that most calls need not ask.
    if len(set(allgather_object(own, call, process_set))) == 1:
        return [], []
    each = {name: (_described(value), _digest([(name, value)], is_quick=is_quick)) for name, value in named}
    replicas = allgather_object(each, call, process_set)
    names = dict.fromkeys(name for replica in replicas for name in replica)
    return [name for name in names if len({replica.get(name) for replica in replicas}) > 1], replicas


def _of_model(model: nn.Module, batch_norm_buffers: bool) -> Iterator[tuple[str, Any]]:
    own = set()
    if not batch_norm_buffers:
        layers = [(name, layer) for name, layer in model.named_modules() if hasattr(layer, "running_mean")]
        own = {f"{name}.{key}".lstrip(".") for name, layer in layers for key, _ in layer.named_buffers(recurse=False)}
    yield from ((f"{name}.training".lstrip("."), module.training) for name, module in model.named_modules())
    yield from ((f"{name}.requires_grad", param.requires_grad) for name, param in model.named_parameters())
    yield from model.named_parameters()
    yield from ((name, buffer) for name, buffer in model.named_buffers() if name not in own)


def _of_optimizer(optimizer: torch.optim.Optimizer | None) -> Iterator[tuple[str, Any]]:
    """Yield the hyperparameters and the state, by the numbers of groups and parameters as in a state_dict."""
    state = {"param_groups": [], "state": {}} if optimizer is None else optimizer.state_dict()
    for number, group in enumerate(state["param_groups"]):
        yield from ((f"optimizer.param_groups[{number}].{name}", value) for name, value in group.items())
    for number, entries in state["state"].items():
        items = entries.items() if isinstance(entries, dict) else [("value", entries)]
        yield from ((f"optimizer.state[{number}].{name}", value) for name, value in items)


def _described(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    return f"{str(value.dtype).removeprefix('torch.')}, {'x'.join(map(str, value.shape)) or 'a scalar'}"


@torch.no_grad()
def _digest(named: Sequence[tuple[str, Any]], *, is_quick: bool = False) -> str:
    """Return a text that is the same for equal names, descriptions and bits.

    Small tensors are read together: operations on each of its own would take most of the time.

    is_quick: take a part of the time for large tensors on a CPU. The places of numbers in a tensor do not count then.
    """
    text = hashlib.blake2b(digest_size=8)
    pending: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = defaultdict(list)
    taken, places = Counter[Any](), Counter[Any]()
    sums: list[torch.Tensor] = []

    def add(kind: tuple[torch.device, torch.dtype]) -> None:
        numbers = torch.cat(pending.pop(kind))
        # Odd weights, so that every bit counts, and so does the place of each number.
        weights = torch.arange(places[kind], taken[kind], device=numbers.device).mul_(2).add_(1)
        sums.append(weights.mul_(numbers).sum())
        places[kind] = taken[kind]

    for name, value in named:
        is_tensor = isinstance(value, torch.Tensor)
        text.update(repr((name, _described(value) if is_tensor else value)).encode())
        for words in _bits(name, value) if is_tensor else ():
            if is_quick:
                sums += [part.sum(dtype=torch.int64) for part in words.split(_PART)]
                continue
            kind = words.device, words.dtype
            for part in words.split(_PART) if len(words) > _PART else (words,):
                pending[kind].append(part)
                taken[kind] += len(part)
                if taken[kind] - places[kind] >= _PART:
                    add(kind)
    for kind in list(pending):
        add(kind)
    for device in dict.fromkeys(number.device for number in sums):  # waits once for each
        text.update(repr(torch.stack([number for number in sums if number.device == device]).tolist()).encode())
    return text.hexdigest()


def _bits(name: str, value: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the bits of a tensor as integers, ((n,), of any width)."""
    if is_dtensor(value):
        fix = "Sharded models are compared by what sharded them."
        raise wrong("model", "of plain tensors", f"a DTensor {name!r}", fix, TypeError)
    data = value.detach()
    if nn.parameter.is_lazy(data) or data.is_meta:
        return
    if data.layout != torch.strided:
        data = data.to_sparse_coo().coalesce()
        yield from (*_bits(name, data.indices()), *_bits(name, data.values()))
    else:
        yield _words(data.int_repr() if data.is_quantized else data)
