"""Metrics over the samples of all ranks: counters added up by one allreduce, and outputs in dataset order."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from .core import types
from .core.checks import converted, instance, integer, items, mapping, number
from .core.collectives.allgather import allgather, grouped_allgather
from .core.collectives.allreduce import allreduce, grouped_allreduce
from .core.collectives.objects import ALLGATHER_OBJECT, on_all_ranks
from .core.collectives.plan import check_rows, check_tensor
from .core.lifecycle import device
from .core.world import ProcessSetLike, channel_of, checked_process_set, global_process_set, reporting

__all__ = ("ConfusionMatrix", "Mean", "Metric", "Sum", "compute", "gather_all_tensors", "gather_in_order")

# Gathering the outputs of all ranks: tensors whose shapes differ from rank to rank.

_ROW = "row shape, dtype and device type"

T = TypeVar("T")


def gather_all_tensors(tensor: torch.Tensor, group: ProcessSetLike | None = None) -> list[torch.Tensor]:
    """Return every rank's `tensor`, of any shapes, in rank order. For torchmetrics' `dist_sync_fn`.

        metric = torchmetrics.AUROC(
            "binary", dist_sync_fn=hvd.metrics.gather_all_tensors, distributed_available_fn=hvd.is_initialized
        )

    Collective over `group`. This rank's own tensor stays in its autograd graph.

    Args:
        tensor: of any shape and number of dimensions; the same dtype on all ranks, except for empty tensors.
        group: None: all ranks. torchmetrics passes its `process_group`.

    Raises:
        TypeError: `tensor` is not a tensor. ValueError: dtypes differ, or the argument of another rank is wrong. One of
            them is raised on every rank.
    """
    with reporting(ALLGATHER_OBJECT, group):
        process_set = global_process_set if group is None else checked_process_set(group, "group")

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
    process_set: ProcessSetLike = global_process_set,
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
    places = torch.empty(0, device="cpu")

    def describe() -> tuple[torch.Size, torch.dtype, str] | None:
        nonlocal batches, places
        batches, places = _checked(outputs, indices)
        if length is not None:
            integer("length", length, least=0, below=1 << 63, fix="Pass the length of the dataset, or None.")
        kinds = [(batch.shape[1:], batch.dtype, batch.device.type) for batch in batches if len(batch)]
        return _common(kinds, _ROW) if kinds else None

    with reporting(ALLGATHER_OBJECT, process_set):
        process_set = checked_process_set(process_set)
    described = [kind for kind in on_all_ranks(describe, ValueError, process_set) if kind is not None]
    if not described:
        raise ValueError("`outputs` must hold a row on some rank, but is empty on all instead.")
    shape, dtype, where = _common(described, _ROW)
    place = torch.device("cpu") if where == "cpu" else next((b.device for b in batches), device())
    rows = torch.cat([torch.empty((0, *shape), dtype=dtype, device=place), *filter(len, batches)]).detach()
    rows, places = grouped_allgather([rows, places.to(place, torch.int64)], process_set=process_set)
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


def _checked(outputs: Any, indices: Any) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Return `outputs` as batches and `indices` as a tensor. Raises TypeError or ValueError."""
    fix = "Pass what the model has returned."
    batches = [outputs] if isinstance(outputs, torch.Tensor) else outputs
    batches = items("outputs", batches, "a tensor or a list of tensors", fix)
    for place, batch in enumerate(batches):
        check_rows(batch, f"outputs[{place}]")
    if not isinstance(indices, torch.Tensor):
        given = items("indices", indices, "dataset indices", "Pass the sampler or a list.")
        indices = torch.tensor([integer("indices", index) for index in given], dtype=torch.int64, device="cpu")
    count = sum(len(batch) for batch in batches)
    if indices.shape != (count,) or indices.is_floating_point():
        raise ValueError(
            f"`indices` must be {count} integers, one for each of `outputs`, "
            f"but are {indices.dtype} of shape {tuple(indices.shape)} instead."
        )
    return batches, indices


def _common(kinds: Sequence[T], what: str) -> T:
    """Return the common value of all `kinds`. Raises ValueError, which names `what` differs, when they differ."""
    if any(kind != kinds[0] for kind in kinds):
        raise ValueError(f"All tensors must have the same {what}, but have {sorted(map(str, set(kinds)))} instead.")
    return kinds[0]


# Counters over the samples of all ranks.
#
# A counter adds up sums and counts on the device of the batches, without waiting for a GPU. One allreduce at the end of
# the epoch gives the value over all samples. It is no average of averages, and a rank without samples adds nothing.


class Metric(ABC):
    """A counter: a tensor of sums on each rank, which `compute` adds up over the ranks.

    A subclass has its own `update`, which calls `_add`. Its `_value` computes the metric from the sums.

    shape, dtype: of the counter. process_set: the ranks whose samples are counted.
    """

    collective_state = True
    """Tells checkpoints that all ranks must call `state_dict`."""

    def __init__(
        self,
        shape: Sequence[int] = (),
        dtype: torch.dtype = torch.float64,
        process_set: ProcessSetLike = global_process_set,
    ) -> None:
        self.process_set = checked_process_set(process_set)
        fix = "Pass a tuple of whole numbers, () for one number."
        sizes = items("shape", shape, "the sizes of a tensor", fix)
        sizes = [integer(f"shape[{place}]", size, least=0) for place, size in enumerate(sizes)]
        instance("dtype", dtype, torch.dtype, "a torch.dtype", "Pass torch.float64 or torch.int64.")
        self._local = torch.zeros(sizes, dtype=dtype, device="cpu")

    def _add(self, amount: torch.Tensor) -> None:
        """Add to this rank's counter. It moves to the GPU with the first `amount` that is there, and stays."""
        device = self._local.device if amount.device.type == "cpu" else amount.device
        self._local = self._local.to(device)
        self._local += amount.detach().to(device)

    @abstractmethod
    def _value(self, total: torch.Tensor) -> torch.Tensor:
        """Return the metric from the sum of all ranks' counters."""

    def compute(self) -> torch.Tensor:
        """Return the value over the samples of all ranks, in CPU memory.

        Collective over the process set: one allreduce. More samples can be added later.
        """
        return self._value(self._total())

    def _total(self) -> torch.Tensor:
        return allreduce(self._local.cpu(), op=types.Sum, process_set=self.process_set)

    def reset(self) -> None:
        """Forget all samples. Local."""
        self._local.zero_()

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the sum of all ranks' counters, equal on every rank, for a world of any size.

        Unlike a module's, it is collective over the process set: call it on all ranks, and write it on one. A metric of
        all ranks in the state of a checkpoint is saved so.
        """
        return {"total": self._total()}

    def load_state_dict(self, state_dict: Mapping[str, torch.Tensor]) -> None:
        """Continue from `state_dict`, equal on every rank. The first rank takes it; the others start at zero. Local."""
        fix = "Pass what state_dict() of such a metric has returned."
        mapping("state_dict", state_dict, "total", fix=fix)
        total = instance("state_dict['total']", state_dict["total"], torch.Tensor, "a torch.Tensor")
        if total.shape != self._local.shape:
            raise ValueError(
                f"`state_dict` must hold a counter of shape {tuple(self._local.shape)}, "
                f"but has {tuple(total.shape)} instead."
            )
        first = channel_of(self.process_set).group.rank == 0
        self._local.copy_(total if first else torch.zeros_like(total))


def _as_tensor(values: torch.Tensor | float) -> torch.Tensor:
    if isinstance(values, torch.Tensor):
        return values.detach()
    convert = functools.partial(torch.as_tensor, dtype=torch.float64 if isinstance(values, float) else None)
    return converted("values", values, convert, "a tensor or a number", "Convert it.", without=bytes)


class Mean(Metric):
    """The mean over samples, 0-dim float64; NaN without samples."""

    def __init__(self, process_set: ProcessSetLike = global_process_set) -> None:
        super().__init__((2,), torch.float64, process_set)

    def update(self, values: torch.Tensor | float, count: torch.Tensor | int | None = None) -> None:
        """Add samples. Local.

        Args:
            values: (n, ...), of which each element is a sample, n may be 0; or one number (0-dim), the mean over
                `count` samples, such as the loss of a batch.
            count: the number of samples of which `values` is the mean. Required if `values` is one number, and not
                allowed otherwise. May be 0.
        """
        values = _as_tensor(values)
        if (values.dim() == 0) != (count is not None):
            raise ValueError(
                "`count` must be given when `values` is one number, and only then, but `values` has shape "
                f"{tuple(values.shape)} and count is {count}. "
                "Pass the number of samples with the mean: update(loss, len(batch))."
            )
        added = values.sum(dtype=torch.float64)
        if count is None:
            self._add(torch.stack([added, torch.full_like(added, values.numel())]))
            return
        if not isinstance(count, torch.Tensor):
            samples = torch.full_like(added, number("count", count, least=0, fix="Pass the number of samples."))
        elif count.numel() == 1:
            samples = count.to(added).reshape(())
        else:
            raise ValueError(f"`count` must be one number, but has shape {tuple(count.shape)} instead.")
        # The mean over no samples is NaN.
        self._add(torch.stack([torch.where(samples > 0, added * samples, 0.0), samples]))

    def _value(self, total: torch.Tensor) -> torch.Tensor:
        return total[0] / total[1]


class Sum(Metric):
    """A sum over samples.

    shape: of one sample. dtype: float64, or int64 for counts.
    """

    def update(self, values: torch.Tensor | float) -> None:
        """Add `values`, (..., *shape): summed over the leading dimensions, which may be empty. Local."""
        values = _as_tensor(values)
        shape = self._local.shape
        leading = values.dim() - len(shape)
        if leading < 0 or values.shape[leading:] != shape:
            raise ValueError(f"`values` must end in the shape {tuple(shape)}, but has {tuple(values.shape)} instead.")
        if values.is_floating_point() and not self._local.is_floating_point():
            raise ValueError(
                f"`values` must be integers to be added up in {self._local.dtype}, but are {values.dtype} instead."
            )
        self._add(values.reshape(-1, *shape).sum(dim=0, dtype=self._local.dtype))

    def _value(self, total: torch.Tensor) -> torch.Tensor:
        return total


class ConfusionMatrix(Metric):
    """The number of samples for each pair of classes: (num_classes, num_classes) int64, [target, predicted].

    ignore_index: samples with this target do not count, whatever is predicted; any integer, such as -100. None: all do.
    """

    def __init__(
        self, num_classes: int, process_set: ProcessSetLike = global_process_set, *, ignore_index: int | None = None
    ) -> None:
        self.ignore_index = None if ignore_index is None else integer("ignore_index", ignore_index)
        # One more row and column for wrong class numbers. Raising in `update` would have to wait for the GPU.
        size = integer("num_classes", num_classes, least=1, below=1 << 16) + 1
        super().__init__((size, size), torch.int64, process_set)

    def update(self, predicted: torch.Tensor, targets: torch.Tensor) -> None:
        """Add samples. predicted, targets: class numbers, equal shapes, any integer dtype. Local."""
        fix = "Take the argmax of scores."
        for name, classes in (("predicted", predicted), ("targets", targets)):
            instance(name, classes, torch.Tensor, "a tensor of class numbers", fix)
        if predicted.shape != targets.shape or predicted.is_floating_point() or targets.is_floating_point():
            raise ValueError(
                "`predicted` and `targets` must be class numbers of the same shape, but are "
                f"{tuple(predicted.shape)} {predicted.dtype} and {tuple(targets.shape)} {targets.dtype} instead. "
                f"{fix}"
            )
        rows, columns = (classes.detach().reshape(-1).long() for classes in (targets, predicted))
        counted = torch.ones_like(rows) if self.ignore_index is None else (rows != self.ignore_index).long()
        none = len(self._local) - 1
        rows, columns = (torch.where((each >= 0) & (each < none), each, none) for each in (rows, columns))
        counts = torch.zeros(self._local.numel(), dtype=torch.int64, device=rows.device)
        counts.index_add_(0, rows * len(self._local) + columns, counted)
        self._add(counts.view_as(self._local))

    def _value(self, total: torch.Tensor) -> torch.Tensor:
        """Return the matrix. Raises ValueError, on every rank, when any rank was given a wrong class number."""
        matrix = total[:-1, :-1]
        if wrong := int(total.sum() - matrix.sum()):
            raise ValueError(
                f"`predicted` and `targets` must be at least 0 and below {len(matrix)}, but {wrong} samples are not."
            )
        return matrix


def compute(metrics: Mapping[str, Metric]) -> dict[str, torch.Tensor]:
    """Return the values of several metrics of one process set, by name. Collective: one allreduce for all of them.

    The ranks match the metrics by name, in any order. Raises CollectiveMismatchError when they have other names.
    """
    fix = 'Pass a dictionary, such as {"loss": loss}.'
    for name, metric in mapping("metrics", metrics, fix=fix).items():
        instance(f"metrics[{name!r}]", metric, Metric, "a Metric", fix)
    process_set = next((metric.process_set for metric in metrics.values()), global_process_set)
    if not metrics or any(metric.process_set is not process_set for metric in metrics.values()):
        raise ValueError(f"`metrics` must be one or more metrics of one process set, but are {dict(metrics)} instead.")
    names = sorted(metrics, key=repr)
    counters = [metrics[name]._local.cpu() for name in names]
    called = f"metrics.compute({', '.join(map(repr, names))})"
    summed = grouped_allreduce(counters, name=called, op=types.Sum, process_set=process_set)
    totals = dict(zip(names, summed, strict=True))
    return {name: metric._value(totals[name]) for name, metric in metrics.items()}
