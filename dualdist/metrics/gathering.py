"""What the ranks have computed for their samples, together: tensors whose shapes differ from rank to rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import torch

from ..collectives import allgather, grouped_allgather
from ..collectives.objects import allgather_object
from ..collectives.plan import check_tensor
from ..world.device import device
from ..world.process_sets import ProcessSet, channel_of, global_process_set

__all__ = ("gather_all_tensors", "gather_in_order")

T = TypeVar("T")


def gather_all_tensors(tensor: torch.Tensor, group: ProcessSet | None = None) -> list[torch.Tensor]:
    """Return every rank's `tensor`, in rank order, whatever their shapes are: torchmetrics' `dist_sync_fn`.

        metric = torchmetrics.AUROC(
            "binary", dist_sync_fn=hvd.metrics.gather_all_tensors, distributed_available_fn=hvd.is_initialized
        )

    Collective over `group`: every member must call it, in the same order. The own one stays in its autograd graph.

    Args:
        tensor: of any shape and number of dimensions; one dtype on all ranks, but for those that are empty.
        group: None: all ranks. torchmetrics passes its `process_group`.

    Raises:
        TypeError: not a tensor; ValueError: dtypes differ. On every rank, ValueError where another rank is wrong.
    """
    process_set = group or global_process_set

    def describe() -> tuple[torch.Size, torch.dtype]:
        check_tensor(tensor)
        return tensor.shape, tensor.dtype

    told = _exchange(describe, process_set)
    sizes = [shape.numel() for shape, _ in told]
    dtype = _common([dtype for (_, dtype), size in zip(told, sizes, strict=True) if size] or [told[0][1]])
    flat = tensor.detach().reshape(-1).to(dtype)
    parts = allgather(flat, process_set=process_set).split(sizes)
    gathered = [part.view(shape) for part, (shape, _) in zip(parts, told, strict=True)]
    if tensor.dtype == dtype:
        gathered[channel_of(process_set).group.rank] = tensor
    return gathered


def gather_in_order(
    outputs: torch.Tensor | Sequence[torch.Tensor],
    indices: torch.Tensor | Iterable[int],
    length: int | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Return the outputs of all ranks in the order of the dataset, each sample once, on every rank.

    Collective: every member of `process_set` must call it, in the same order. Not differentiable.

        sampler = hvd.DistributedSampler(data, shuffle=False, pad=False)
        outputs = [model(images) for images, _ in DataLoader(data, 32, sampler=sampler)]
        predictions = hvd.metrics.gather_in_order(outputs, sampler, length=len(data))

    Args:
        outputs: (n, ...), or batches of them, which may be no batch at all; n may differ between ranks and be 0.
        indices: (n,) integers, which sample of the dataset each output is of; or the sampler that they came from.
            Of samples that came several times, as from a sampler that pads, the output of the lowest rank is kept.
        length: how many samples the dataset has, to be sure that each of them is there.

    Returns:
        (number of different indices, ...), by rising index, same dtype and device as `outputs`.

    Raises:
        TypeError, ValueError: an argument is wrong, or samples are missing. On every rank, ValueError where another
            rank is wrong.
    """
    batches = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
    places = torch.empty(0)

    def describe() -> tuple[torch.Size, torch.dtype, str] | None:
        nonlocal places
        if isinstance(indices, torch.Tensor):
            places = indices
        else:
            places = torch.tensor(list(indices), dtype=torch.int64)
        count = sum(len(batch) for batch in batches)
        if places.shape != (count,) or places.is_floating_point():
            raise ValueError(
                f"`indices` must be {count} integers, one for each output, "
                f"but are {places.dtype} of shape {tuple(places.shape)} instead."
            )
        kinds = [(batch.shape[1:], batch.dtype, batch.device.type) for batch in batches if len(batch)]
        return _common(kinds) if kinds else None

    told = [kind for kind in _exchange(describe, process_set) if kind is not None]
    if not told:
        raise ValueError("`outputs` must hold a row on some rank, but is empty on all instead.")
    shape, dtype, where = _common(told)
    place = torch.device("cpu") if where == "cpu" else next((b.device for b in batches), device())
    rows = torch.cat([torch.empty((0, *shape), dtype=dtype, device=place), *filter(len, batches)]).detach()
    rows, places = grouped_allgather([rows, places.to(place, torch.int64)], process_set=process_set)
    return _in_order(rows, places, length)


def _in_order(rows: torch.Tensor, places: torch.Tensor, length: int | None) -> torch.Tensor:
    places, order = places.sort(stable=True)
    first = torch.ones_like(places, dtype=torch.bool)
    first[1:] = places[1:] != places[:-1]
    found = places[first]
    if length is not None and not torch.equal(found, torch.arange(length, device=found.device)):
        missing = sorted(set(range(length)) - set(found.tolist()))
        raise ValueError(
            f"`indices` must be those of all {length} samples, but are {len(found)} instead. "
            f"Missing: {missing[:5]}; last: {found[-1]}."
        )
    return rows[order[first]]


def _exchange(describe: Callable[[], T], process_set: ProcessSet) -> list[T]:
    """Return what `describe` returns on each rank. Collective. When it raises on one rank, every rank raises."""
    mine, error = None, None
    try:
        mine = describe()
    except Exception as raised:
        error = raised
    told = allgather_object((mine, error and str(error)), process_set=process_set)
    if error is not None:
        raise error
    for rank, (_, problem) in zip(process_set.ranks or (), told, strict=True):
        if problem is not None:
            raise ValueError(f"Rank {rank} failed: {problem}")
    return [value for value, _ in told]


def _common(kinds: Sequence[T]) -> T:
    """Return what all `kinds` are. Raises ValueError when they differ."""
    if any(kind != kinds[0] for kind in kinds):
        raise ValueError(f"All tensors must be alike, but are {sorted(map(str, set(kinds)))} instead.")
    return kinds[0]
