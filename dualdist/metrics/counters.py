"""Counters over the samples of all ranks.

A counter adds up sums and counts on the device of the batches, without waiting for a GPU. One allreduce at the end of
the epoch gives the value over all samples. It is never an average of averages, and a rank without samples adds nothing.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import torch

from .. import types
from ..checks import converted, instance, integer, items, mapping, number
from ..collectives import allreduce, grouped_allreduce
from ..world.process_sets import ProcessSet, channel_of, check_process_set, global_process_set

__all__ = ("ConfusionMatrix", "Mean", "Metric", "Sum", "compute")


class Metric(ABC):
    """A counter: a tensor of sums on each rank, which `compute` adds up over the ranks.

    A subclass has its own `update`, which calls `_add`. Its `_value` computes the metric from the sums.

    shape, dtype: of the counter. process_set: the ranks whose samples are counted.
    """

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, process_set: ProcessSet) -> None:
        check_process_set(process_set)
        self.process_set = process_set
        sizes = items(
            "shape", shape, "the sizes of a tensor", "Pass a tuple of whole numbers, () for one number."
        )
        sizes = [integer(f"shape[{place}]", size, least=0) for place, size in enumerate(sizes)]
        instance("dtype", dtype, torch.dtype, "a torch.dtype", "Pass torch.float64 or torch.int64.")
        self._local = torch.zeros(sizes, dtype=dtype)

    def _add(self, amount: torch.Tensor) -> None:
        """Add to this rank's counter. It moves to the GPU with the first `amount` that is there, and stays."""
        amount = amount.detach()
        if amount.device.type == "cpu":
            amount = amount.to(self._local.device)
        else:
            self._local = self._local.to(amount.device)
        self._local += amount

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

        Unlike a module's, it is collective over the process set: call it on all ranks, and write it on one.
        """
        return {"total": self._total()}

    def load_state_dict(self, state_dict: Mapping[str, torch.Tensor]) -> None:
        """Continue from `state_dict`, equal on every rank. The first rank takes it; the others start at zero. Local."""
        mapping(
            "state_dict", state_dict, "total", fix="Pass what state_dict() of such a metric has returned."
        )
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

    def __init__(self, process_set: ProcessSet = global_process_set) -> None:
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
        samples = torch.full_like(added, values.numel())
        if isinstance(count, torch.Tensor):
            if count.numel() != 1:
                raise ValueError(f"`count` must be one number, but has shape {tuple(count.shape)} instead.")
            samples = count.to(added)
        elif count is not None:
            samples.fill_(number("count", count, least=0, fix="Pass the number of samples."))
        if count is not None:
            # The mean over no samples is NaN.
            added = torch.where(samples > 0, added * samples, 0.0)
        self._add(torch.stack([added, samples]))

    def _value(self, total: torch.Tensor) -> torch.Tensor:
        return total[0] / total[1]


class Sum(Metric):
    """A sum over samples.

    shape: of one sample. dtype: float64, or int64 for counts.
    """

    def __init__(
        self,
        shape: Sequence[int] = (),
        dtype: torch.dtype = torch.float64,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        super().__init__(shape, dtype, process_set)

    def update(self, values: torch.Tensor | float) -> None:
        """Add `values`, (..., *shape): summed over the leading dimensions, which may be empty. Local."""
        values = _as_tensor(values)
        shape = self._local.shape
        leading = values.dim() - len(shape)
        if leading < 0 or values.shape[leading:] != shape:
            raise ValueError(
                f"`values` must end in the shape {tuple(shape)}, but has {tuple(values.shape)} instead."
            )
        if values.is_floating_point() and not self._local.is_floating_point():
            raise ValueError(
                f"`values` must be integers to be added up in {self._local.dtype}, but are {values.dtype} instead."
            )
        self._add(values.reshape(-1, *shape).sum(dim=0, dtype=self._local.dtype))

    def _value(self, total: torch.Tensor) -> torch.Tensor:
        return total


class ConfusionMatrix(Metric):
    """The number of samples for each pair of classes: (num_classes, num_classes) int64, [target, predicted]."""

    def __init__(self, num_classes: int, process_set: ProcessSet = global_process_set) -> None:
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
        rows, columns = (self._row(classes) for classes in (targets, predicted))
        counts = torch.zeros(self._local.numel(), dtype=torch.int64, device=rows.device)
        counts.index_add_(0, rows * len(self._local) + columns, torch.ones_like(rows))
        self._add(counts.view_as(self._local))

    def _row(self, classes: torch.Tensor) -> torch.Tensor:
        none = len(self._local) - 1
        classes = classes.detach().reshape(-1).long()
        return torch.where((classes >= 0) & (classes < none), classes, none)

    def _value(self, total: torch.Tensor) -> torch.Tensor:
        """Return the matrix. Raises ValueError, on every rank, when any rank was given a wrong class number."""
        matrix = total[:-1, :-1]
        wrong = int(total.sum() - matrix.sum())
        if wrong:
            raise ValueError(
                f"`predicted` and `targets` must be at least 0 and below {len(matrix)}, "
                f"but {wrong} samples are not."
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
        raise ValueError(
            f"`metrics` must be one or more metrics of one process set, but are {dict(metrics)} instead."
        )
    names = sorted(metrics, key=repr)
    counters = [metrics[name]._local.cpu() for name in names]
    called = f"metrics.compute({', '.join(map(repr, names))})"
    summed = grouped_allreduce(counters, name=called, op=types.Sum, process_set=process_set)
    totals = dict(zip(names, summed, strict=True))
    return {name: metric._value(totals[name]) for name, metric in metrics.items()}
