"""Counters over the samples of all ranks.

A counter adds up sums and counts where the batches are, without waiting for a GPU, and one allreduce at the end of the
epoch gives the value over all samples: never an average of averages, and a rank without any sample counts as none.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import torch

from .. import types
from ..collectives import allreduce, grouped_allreduce
from ..world.process_sets import ProcessSet, channel_of, global_process_set

__all__ = ("ConfusionMatrix", "Mean", "Metric", "Sum", "compute")


class Metric(ABC):
    """A counter: a tensor that is added up on each rank, and over the ranks by `compute`.

    A subclass has an `update` of its own, which calls `_add`, and says in `_value` what the sums mean.

    shape, dtype: of the counter. process_set: whose samples are counted.
    """

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, process_set: ProcessSet) -> None:
        self.process_set = process_set
        self._local = torch.zeros(tuple(shape), dtype=dtype)

    def _add(self, amount: torch.Tensor) -> None:
        """Add to this rank's counter, on the GPU once something came from there."""
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
        """Return the value over all samples that any rank was given, in CPU memory.

        Collective over the process set: one allreduce. More samples can be added afterwards.
        """
        return self._value(self._total())

    def _total(self) -> torch.Tensor:
        return allreduce(self._local.cpu(), op=types.Sum, process_set=self.process_set)

    def reset(self) -> None:
        """Forget all samples. Local."""
        self._local.zero_()

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the sum of all ranks' counters, the same on every rank, for a world of any size.

        Collective over the process set, unlike that of a module: call it on all ranks, write it on one.
        """
        return {"total": self._total()}

    def load_state_dict(self, state_dict: Mapping[str, torch.Tensor]) -> None:
        """Continue from `state_dict`, the same on every rank: the first holds it, the others begin at zero. Local."""
        total = state_dict["total"]
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
    return torch.as_tensor(values, dtype=torch.float64 if isinstance(values, float) else None)


class Mean(Metric):
    """The mean over samples, 0-dim float64; NaN when there are none."""

    def __init__(self, process_set: ProcessSet = global_process_set) -> None:
        super().__init__((2,), torch.float64, process_set)

    def update(self, values: torch.Tensor | float, count: torch.Tensor | int | None = None) -> None:
        """Add samples. Local.

        Args:
            values: (n, ...), where each element counts once, n may be 0; or a number (0-dim), the mean over `count`
                samples, such as the loss of a batch.
            count: how many samples a number stands for; must be given with one, and not otherwise. May be 0.
        """
        values = _as_tensor(values)
        if (values.dim() == 0) != (count is not None):
            raise ValueError(
                "`count` must be given when `values` is one number, and only then, but `values` has shape "
                f"{tuple(values.shape)} and count is {count}. "
                "Say of how many samples it is the mean: update(loss, len(batch))."
            )
        added = values.sum(dtype=torch.float64)
        number = torch.full_like(added, values.numel())
        if isinstance(count, torch.Tensor):
            number = count.to(added)
        elif count is not None:
            number.fill_(count)
        if count is not None:
            added = torch.where(number > 0, added * number, 0.0)  # the mean over no samples is NaN
        self._add(torch.stack([added, number]))

    def _value(self, total: torch.Tensor) -> torch.Tensor:
        return total[0] / total[1]


class Sum(Metric):
    """A sum over samples.

    shape: of what is added up. dtype: float64, or int64 for counts.
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
    """How often each class was predicted as each: (num_classes, num_classes) int64, [target, predicted]."""

    def __init__(self, num_classes: int, process_set: ProcessSet = global_process_set) -> None:
        # One more row and column for what is no class: to raise at once, a GPU would have to be waited for.
        super().__init__((num_classes + 1, num_classes + 1), torch.int64, process_set)

    def update(self, predicted: torch.Tensor, targets: torch.Tensor) -> None:
        """Add samples. predicted, targets: numbers of classes, equal shapes, any integer dtype. Local."""
        if predicted.shape != targets.shape or predicted.is_floating_point() or targets.is_floating_point():
            raise ValueError(
                "`predicted` and `targets` must be equally many numbers of classes, but are "
                f"{tuple(predicted.shape)} {predicted.dtype} and {tuple(targets.shape)} {targets.dtype} instead. "
                "Take the argmax of scores."
            )
        rows, columns = (self._row(classes) for classes in (targets, predicted))
        cells = torch.zeros(self._local.numel(), dtype=torch.int64, device=rows.device)
        cells.index_add_(0, rows * len(self._local) + columns, torch.ones_like(rows))
        self._add(cells.view_as(self._local))

    def _row(self, classes: torch.Tensor) -> torch.Tensor:
        none = len(self._local) - 1
        classes = classes.detach().reshape(-1).long()
        return torch.where((classes >= 0) & (classes < none), classes, none)

    def _value(self, total: torch.Tensor) -> torch.Tensor:
        """Raises ValueError, on every rank, when some rank was given what is no class."""
        matrix = total[:-1, :-1]
        strange = int(total.sum() - matrix.sum())
        if strange:
            raise ValueError(
                f"`predicted` and `targets` must be at least 0 and below {len(matrix)}, "
                f"but {strange} samples are not."
            )
        return matrix


def compute(metrics: Mapping[str, Metric]) -> dict[str, torch.Tensor]:
    """Return the values of several metrics of one process set by one allreduce, under their names. Collective."""
    process_set = next((metric.process_set for metric in metrics.values()), global_process_set)
    if not metrics or any(metric.process_set is not process_set for metric in metrics.values()):
        raise ValueError(
            f"`metrics` must be of one process set, at least one, but are {dict(metrics)} instead."
        )
    counters = [metric._local.cpu() for metric in metrics.values()]
    totals = grouped_allreduce(counters, op=types.Sum, process_set=process_set)
    return {name: metrics[name]._value(total) for name, total in zip(metrics, totals, strict=True)}
