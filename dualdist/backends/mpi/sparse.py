"""The sum of sparse tensors: every member sends its indices and values to every other one, and adds them up itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

__all__ = ("SparseSum",)


class SparseSum:
    """The sum of one sparse tensor (COO, on the CPU) of each member, in steps. `finish` writes it to the tensor."""

    def __init__(self, tensor: torch.Tensor, op: Any, rank: int, size: int) -> None:
        """Raises RuntimeError unless `op`, a ReduceOp, is SUM, as over gloo."""
        if getattr(op, "op", op) != dist.ReduceOp.SUM:
            raise RuntimeError(f"The reduction of sparse tensors must be SUM, but is {op} instead.")
        self._tensor, self._rank = tensor, rank
        own = tensor.detach().coalesce()
        self._own = (own.indices().contiguous(), own.values().contiguous())
        self.counts = torch.zeros(size, dtype=torch.int64)
        """The number of elements of each member. Each member sets its own; then they are gathered."""
        self.counts[rank] = own.indices().shape[1]
        self._rows: list[list[torch.Tensor]] = []

    def messages(self) -> Iterator[tuple[torch.Tensor, list[torch.Tensor]]]:
        """Yield (what this member sends, where it receives from each member), once `counts` is complete."""
        counts = self.counts.tolist()
        indices, values = self._own
        places = [torch.empty(len(indices), count, dtype=indices.dtype) for count in counts]
        numbers = [torch.empty(count, *values.shape[1:], dtype=values.dtype) for count in counts]
        places[self._rank], numbers[self._rank] = indices, values
        self._rows = [places, numbers]
        yield indices, places
        yield values, numbers

    def finish(self) -> None:
        """Add up what was received, in the order of the members, so that all have the same bits."""
        places, numbers = torch.cat(self._rows[0], 1), torch.cat(self._rows[1])
        with torch.inference_mode(self._tensor.is_inference()), torch.no_grad():
            rows = torch.sparse_coo_tensor(places, numbers, self._tensor.shape, check_invariants=True)
            self._tensor.copy_(rows.coalesce())
