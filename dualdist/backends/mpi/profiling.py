"""Ranges in torch's profiler, named as those of torch's own groups: `mpi4py:all_reduce` as `gloo:all_reduce`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

__all__ = ("profiler_range",)

_NAMES = {"allreduce": "all_reduce", "allgather": "all_gather", "alltoall": "all_to_all"}


def profiler_range(what: str, inputs: Sequence[torch.Tensor]) -> Any:
    """Start a range if a profiler is running. Return a future whose result ends it, from any thread; None if none is.

    what: the call, such as "allreduce" or "recv from 1". inputs: the tensors whose shapes the range shows.
    """
    if not torch._C._autograd._profiler_enabled():
        return None
    name = what.split()[0]
    started = torch._C._autograd._record_function_with_args_enter(f"mpi4py:{_NAMES.get(name, name)}", *inputs)
    end: Any = torch.futures.Future()
    torch.ops.profiler._call_end_callbacks_on_jit_fut._RecordFunction(started, end)
    return end
