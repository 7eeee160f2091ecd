"""Gathering the outputs of all ranks: tensors whose shapes differ from rank to rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import torch

from ..agreement import call_kinds
from ..checks import integer, items
from ..collectives import allgather, grouped_allgather
from ..collectives.on_all_ranks import on_all_ranks
from ..collectives.plans.arguments import check_rows, check_tensor
from ..world.device import device
from ..world.process_sets import ProcessSet, channel_of, check_process_set, global_process_set, reporting

__all__ = ("gather_all_tensors", "gather_in_order")

_ROW = "row shape, dtype and device type"

T = TypeVar("T")


def gather_all_tensors(tensor: torch.Tensor, group: ProcessSet | None = None) -> list[torch.Tensor]:
    """Return every rank's `tensor`, of any shapes, in rank order. For torchmetrics' `dist_sync_fn`.

        metric = torchmetrics.AUROC(
            "binary", dist_sync_fn=hvd.metrics.gather_all_tensors, distributed_available_fn=hvd.is_initialized
        )

    Collective over `group`: every member must call it. This rank's own tensor stays in its autograd
    graph.

    Args:
        tensor: of any shape and number of dimensions; the same dtype on all ranks, except for empty tensors.
        group: None: all ranks. torchmetrics passes its `process_group`.

    Raises:
        TypeError: `tensor` is not a tensor. ValueError: dtypes differ, or the argument of another rank is wrong. One of
            them is raised on every rank.
    """
    with reporting(call_kinds.ALLGATHER_OBJECT, group):
        if group is not None:
            check_process_set(group, "group")
    process_set = group or global_process_set

    def describe() -> tuple[torch.Size, torch.dtype]:
        check_tensor(tensor)
        return tensor.shape, tensor.dtype

    described = on_all_ranks(describe, ValueError, process_set)
    sizes = [shape.numel() for shape, _ in described]
    dtypes = [dtype for (_, dtype), size in zip(described, sizes, strict=True) if size]
    dtype = _common(dtypes or [described[0][1]], "dtype")
    flat = tensor.detach().reshape(-1).to(dtype)
    parts = allgather(flat, process_set=process_set).split(sizes)
    gathered = [part.view(shape) for part, (shape, _) in zip(parts, described, strict=True)]
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

    Collective: every member of `process_set` must call it. Not differentiable.

        sampler = hvd.DistributedSampler(data, shuffle=False, pad=False)
        outputs = [model(images) for images, _ in DataLoader(data, 32, sampler=sampler)]
        predictions = hvd.metrics.gather_in_order(outputs, sampler, length=len(data))

    Args:
        outputs: (n, ...), or a sequence of such batches, which may be empty; n may differ between ranks and be 0.
        indices: (n,) integers, the dataset index of each output; or the sampler that yields them. If an index occurs
            several times, as from a sampler that pads, the output of the lowest rank is kept.
        length: the number of samples in the dataset, to check that none is missing. None: no check.

    Returns:
        (number of different indices, ...), sorted by index, same dtype and device as `outputs`.

    Raises:
        TypeError, ValueError: an argument is wrong, or samples are missing. Every rank raises; ValueError if only the
            argument of another rank is wrong.
    """
    batches: list[torch.Tensor] = []
    places = torch.empty(0)

    def describe() -> tuple[torch.Size, torch.dtype, str] | None:
        nonlocal batches, places
        batches, places = _checked(outputs, indices)
        if length is not None:
            integer("length", length, least=0, below=1 << 63, fix="Pass the length of the dataset, or None.")
        kinds = [(batch.shape[1:], batch.dtype, batch.device.type) for batch in batches if len(batch)]
        return _common(kinds, _ROW) if kinds else None

    with reporting(call_kinds.ALLGATHER_OBJECT, process_set):
        check_process_set(process_set)
    described = [kind for kind in on_all_ranks(describe, ValueError, process_set) if kind is not None]
    if not described:
        raise ValueError("`outputs` must hold a row on some rank, but is empty on all instead.")
    shape, dtype, where = _common(described, _ROW)
    place = torch.device("cpu") if where == "cpu" else next((b.device for b in batches), device())
    rows = torch.cat([torch.empty((0, *shape), dtype=dtype, device=place), *filter(len, batches)]).detach()
    rows, places = grouped_allgather([rows, places.to(place, torch.int64)], process_set=process_set)
    return _in_order(rows, places, length)


def _checked(outputs: Any, indices: Any) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Return `outputs` as batches and `indices` as a tensor. Raises TypeError or ValueError."""
    fix = "Pass what the model has returned."
    batches = [outputs] if isinstance(outputs, torch.Tensor) else outputs
    batches = items("outputs", batches, "a tensor or a list of tensors", fix)
    for place, batch in enumerate(batches):
        check_rows(batch, f"outputs[{place}]")
    if not isinstance(indices, torch.Tensor):
        given = items("indices", indices, "dataset indices", "Pass the sampler or a list.")
        indices = torch.tensor([integer("indices", index) for index in given], dtype=torch.int64)
    count = sum(len(batch) for batch in batches)
    if indices.shape != (count,) or indices.is_floating_point():
        raise ValueError(
            f"`indices` must be {count} integers, one for each of `outputs`, "
            f"but are {indices.dtype} of shape {tuple(indices.shape)} instead."
        )
    return batches, indices


def _in_order(rows: torch.Tensor, places: torch.Tensor, length: int | None) -> torch.Tensor:
    places, order = places.sort(stable=True)
    first = torch.ones_like(places, dtype=torch.bool)
    first[1:] = places[1:] != places[:-1]
    found = places[first]
    if length is not None and not torch.equal(found, torch.arange(length, device=found.device)):
        missing = sorted(set(range(length)) - set(found.tolist()))
        raise ValueError(
            f"With `length`={length}, `indices` must name all {length} samples, but name {len(found)} instead. "
            f"Missing: {missing[:5]}; last: {found[-1]}."
        )
    return rows[order[first]]


def _common(kinds: Sequence[T], what: str) -> T:
    """Return the common value of all `kinds`. Raises ValueError, which names `what` differs, when they differ."""
    if any(kind != kinds[0] for kind in kinds):
        raise ValueError(
            f"All tensors must have the same {what}, but have {sorted(map(str, set(kinds)))} instead."
        )
    return kinds[0]
