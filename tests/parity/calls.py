"""Single calls, drawn at random, that are made on dualdist and on real Horovod in the same processes.

Every rank makes its own numbers from the drawn seed and its rank, calls real Horovod and dualdist, and compares value,
dtype, shape, aliasing and the class of an error. Only what real Horovod supports is drawn: its five dtypes for
reductions, contiguous tensors.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st

REDUCED = ("int32", "int64", "float16", "float32", "float64")
MOVED = (*REDUCED, "uint8", "int8", "int16")
OPS = ("Average", "Sum", "Min", "Max", "Product")


@dataclass(frozen=True)
class Case:
    """One call: `kind` is the name of the function without its suffix, `form` the suffix."""

    kind: str
    form: str
    dtype: str
    shape: tuple[int, ...]
    op: str
    prescale: float
    postscale: float
    root: int
    count: int
    seed: int


def cases() -> st.SearchStrategy[Case]:
    scale = st.sampled_from([1.0, 0.5, 3.0, -1.5])
    form = st.sampled_from(["", "_", "_async", "_async_"])
    out_of_place = st.sampled_from(["", "_async"])

    def of(kinds: list[str], forms: Any, dtypes: tuple[str, ...], ops: tuple[str, ...] = OPS, dims: int = 0) -> Any:
        shape = st.lists(st.integers(0, 4), min_size=dims, max_size=3).map(tuple)
        return st.builds(
            Case,
            st.sampled_from(kinds),
            forms,
            st.sampled_from(dtypes),
            shape,
            st.sampled_from(ops),
            scale,
            scale,
            st.integers(-1, 3),
            st.integers(1, 3),
            st.integers(0, 2**16),
        )

    return st.one_of(
        of(["allreduce", "grouped_allreduce"], form, REDUCED),
        of(["allgather", "grouped_allgather", "alltoall"], out_of_place, MOVED, dims=1),
        of(["broadcast"], form, MOVED),
        of(["reducescatter", "grouped_reducescatter"], out_of_place, REDUCED, ("Average", "Sum")),
    )


_numbers = itertools.count()


def compare(case: Case) -> None:
    """Make one call on both sides and compare what they do. Runs on every rank."""
    import horovod.torch

    import dualdist

    if not horovod.torch.is_initialized():
        horovod.torch.init()
    name = f"case{next(_numbers)}"
    theirs = outcome(horovod.torch, case, name)
    ours = outcome(dualdist, case, name)
    assert ours[0] == theirs[0], (ours, theirs)
    rtol = {"float16": 2e-3, "float32": 1e-6, "float64": 1e-14}.get(case.dtype, 0)
    torch.testing.assert_close(ours[1], theirs[1], rtol=rtol, atol=0, equal_nan=True)


def outcome(hvd: Any, case: Case, name: str) -> tuple[Any, list[torch.Tensor]]:
    """Return what can be compared exactly (types, aliasing, the class of an error), and the tensors."""
    tensors = make(case, hvd.rank())
    before = [tensor.clone() for tensor in tensors]
    try:
        result = call(hvd, case, tensors, name)
    except hvd.HorovodInternalError:
        return "HorovodInternalError", []
    except (ValueError, TypeError, IndexError) as error:
        return type(error).__name__, []
    outputs = list(result) if isinstance(result, list | tuple) else [result]
    kept = [now.equal(then) or bool(now.isnan().any()) for now, then in zip(tensors, before, strict=True)]
    facts = (
        type(result).__name__,
        [(output.dtype, tuple(output.shape), any(output is tensor for tensor in tensors)) for output in outputs],
        None if case.form.endswith("_") else kept,
    )
    return facts, outputs


def make(case: Case, rank: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(case.seed * 10 + rank)
    count = case.count if case.kind.startswith("grouped") else 1
    shape = case.shape
    if case.kind in ("allgather", "grouped_allgather") and shape:
        shape = (shape[0] + rank, *shape[1:])  # ragged
    dtype = getattr(torch, case.dtype)
    low = 0 if dtype is torch.uint8 else -4
    return [torch.randint(low, 5, shape, generator=generator).to(dtype) for _ in range(count)]


def call(hvd: Any, case: Case, tensors: list[torch.Tensor], name: str) -> Any:
    function: Callable[..., Any] = getattr(hvd, case.kind + case.form)
    given: Any = tensors if case.kind.startswith("grouped") else tensors[0]
    op = getattr(hvd, case.op)
    scales = {"prescale_factor": case.prescale, "postscale_factor": case.postscale}
    if "allreduce" in case.kind or "reducescatter" in case.kind:
        result = function(given, name=name, op=op, **scales)
    elif case.kind == "broadcast":
        result = function(given, case.root, name=name)
    elif case.kind == "alltoall" and case.shape and case.count > 1:
        rows = case.shape[0]
        splits = [rows // hvd.size()] * hvd.size()
        result = function(given, splits if case.count == 2 else torch.tensor(splits, dtype=torch.int32), name=name)
    else:
        result = function(given, name=name)
    return hvd.synchronize(result) if "async" in case.form else result
