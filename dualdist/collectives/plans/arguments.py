"""The arguments of collectives: checks on this rank, and descriptions that must be equal on all ranks."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ...agreement.call_site import warn_deprecated
from ...checks import integer, is_dtensor, items, number, reduce_op, wrong
from ...types import REDUCE_OP_NAMES, Adasum, Average, Op, Sum
from ...world.process_sets import ProcessSet, channel_of
from ..adasum import check_adasum_size
from ..reduction import Reduction
from ..wire import check_reducible

__all__ = (
    "ReductionArguments",
    "check_reduction",
    "check_root",
    "check_rows",
    "check_splits",
    "check_tensor",
    "check_tensors",
    "describe_reduction",
    "describe_rows",
    "dtype_name",
)


@functools.cache
def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of `dtype`, such as "float32"."""
    return str(dtype).removeprefix("torch.")


def check_tensor(tensor: Any, what: str = "tensor") -> None:
    """Raise TypeError or ValueError unless `tensor` is a dense tensor that can be sent."""
    if not isinstance(tensor, torch.Tensor):
        raise wrong(what, "a torch.Tensor", tensor, "Convert it with torch.as_tensor().", TypeError)
    if type(tensor) is not torch.Tensor and is_dtensor(tensor):
        raise TypeError(
            f"`{what}` must be a plain tensor, but is a DTensor instead. Pass its to_local() or full_tensor(). Models "
            "that fully_shard or parallelize_module has changed exchange parameters and gradients themselves."
        )
    if tensor.layout is not torch.strided:
        raise ValueError(
            f"`{what}` must be dense, but is {tensor.layout} instead. Use sparse_allreduce_async, or to_dense()."
        )
    if tensor.is_quantized or tensor.is_meta:
        raise ValueError(
            f"`{what}` must hold plain numbers, but is {tensor.dtype} on {tensor.device} instead. "
            "Use dequantize(), or a tensor with data."
        )


def check_tensors(tensors: Any, *, grouped: bool) -> list[torch.Tensor]:
    """Return `tensors` as a list. Raise TypeError or ValueError unless all can be sent.

    grouped: whether the user gave the sequence `tensors`, and not a single `tensor`.
    """
    if not grouped:
        check_tensor(tensors[0])
        return list(tensors)
    rule, fix = "a list or tuple of tensors", "Use the function without `grouped_` for one."
    if isinstance(tensors, torch.Tensor):
        raise wrong("tensors", rule, tensors, fix, TypeError)
    given = items("tensors", tensors, rule, fix)
    if not given:
        raise ValueError("`tensors` must hold at least one tensor, but is empty instead. Skip the call.")
    for place, tensor in enumerate(given):
        check_tensor(tensor, f"tensors[{place}]")
    return given


def check_rows(tensor: Any, what: str = "tensor") -> None:
    """Raise TypeError or ValueError unless `tensor` can be sent and has rows, (n, ...)."""
    check_tensor(tensor, what)
    if tensor.dim() == 0:
        raise ValueError(
            f"`{what}` must have at least one dimension, but is a number instead. Use reshape(1)."
        )


def check_root(root_rank: Any, process_set: ProcessSet) -> tuple[int, int]:
    """Return the global rank `root_rank` as an int, and its index in the set. Raises ValueError for other ranks."""
    ranks = channel_of(process_set).group.ranks
    rank = integer("root_rank", root_rank, fix="Pass a global rank.")
    if rank not in ranks:
        raise ValueError(
            f"`root_rank` must be one of the ranks {list(ranks)}, but is {rank} instead. Pass a global rank."
        )
    return rank, ranks.index(rank)


def check_splits(tensor: torch.Tensor, splits: Any, size: int) -> list[int]:
    """Return the number of rows for each rank. Raises ValueError unless `splits` fits `size` and `tensor`."""
    rows = tensor.shape[0]
    if splits is None:
        if rows % size:
            raise ValueError(
                f"`tensor` must have rows that divide by {size} ranks, but has {rows} instead. Give `splits`."
            )
        return [rows // size] * size
    if isinstance(splits, torch.Tensor):
        if splits.dtype is not torch.int32 or splits.dim() != 1:
            raise ValueError(
                f"`splits` must be a 1-D int32 tensor, but is {splits.dim()}-D {splits.dtype} instead."
            )
        splits = splits.tolist()
    given = items("splits", splits, "a list of whole numbers", "Give the number of rows for each rank.")
    counts = [integer(f"splits[{place}]", count) for place, count in enumerate(given)]
    if len(counts) != size or min(counts) < 0 or sum(counts) > rows:
        raise ValueError(
            f"`splits` must be {size} numbers of at least 0 with a sum of at most {rows} rows, but is "
            f"{counts} instead. Give the number of rows for each rank."
        )
    return counts


class ReductionArguments(NamedTuple):
    """The arguments that choose a reduction, as the user gave them."""

    op: Op | None
    prescale_factor: float = 1.0
    postscale_factor: float = 1.0
    average: bool | None = None

    def reduction(self, default: int | None = None) -> Reduction:
        """Return the Reduction. default: the op that None means, if it is allowed.

        Raises ValueError or TypeError, and warns as Horovod does (horovod/common/util.py:214).
        """
        op = default if self.op is None else self.op
        if self.average is not None:
            # A string is a name in its place, as in `allreduce(tensor, "loss")`. Horovod averages then, too.
            if not isinstance(self.average, bool | str):  # such as an op in its place
                raise wrong("average", "True, False or None", self.average, "Use `op=` instead.", TypeError)
            if self.op is not None:
                raise ValueError("`average` must not be given together with `op`. Use `op` alone.")
            warn_deprecated("`average` is deprecated; use `op` instead.")
            op = Average if self.average else Sum
        prescale, postscale = self.prescale_factor, self.postscale_factor
        if type(op) is int and type(prescale) is type(postscale) is float and prescale == postscale == 1.0:
            return _unscaled(op)
        return Reduction(
            reduce_op(op),
            number("prescale_factor", prescale),
            number("postscale_factor", postscale),
        )


@functools.cache
def _unscaled(op: int) -> Reduction:
    return Reduction(reduce_op(op))


def check_reduction(tensors: Sequence[torch.Tensor], reduction: Reduction, process_set: ProcessSet) -> None:
    """Raise ValueError or NotImplementedError unless `reduction` can be applied to `tensors`, which can be sent."""
    for tensor in tensors:
        check_reducible(tensor.dtype, reduction.op)
    if len(tensors) > 1 and len({tensor.device for tensor in tensors}) > 1:
        raise ValueError(
            f"`tensors` must be on one device, but are on {sorted({str(t.device) for t in tensors})} instead. "
            "Move them to one."
        )
    if reduction.op == Adasum:
        check_adasum_size(channel_of(process_set).group.size)


def describe_reduction(tensors: Sequence[torch.Tensor], reduction: Reduction) -> dict[str, Any]:
    """Return the arguments of a reduction of `tensors` for its Call, in the order in which errors show them."""
    tensors_of_call = tuple([(tensor.shape, tensor.dtype) for tensor in tensors])
    return _describe_reduction(tensors_of_call, tensors[0].device.type, reduction)


@functools.lru_cache(maxsize=1024)
def _describe_reduction(
    tensors: tuple[tuple[torch.Size, torch.dtype], ...], device: str, reduction: Reduction
) -> dict[str, Any]:
    return {
        "shapes": tuple(tuple(shape) for shape, _ in tensors),
        "dtypes": tuple(dtype_name(dtype) for _, dtype in tensors),
        "op": REDUCE_OP_NAMES[reduction.op],
        "prescale_factor": reduction.prescale_factor,
        "postscale_factor": reduction.postscale_factor,
        "device": device,
    }


def describe_rows(tensor: torch.Tensor) -> dict[str, Any]:
    """Return the arguments for the Call of a collective that moves rows of `tensor`, (n, ...)."""
    return {
        "trailing_shape": tuple(tensor.shape[1:]),
        "dtype": dtype_name(tensor.dtype),
        "device": tensor.device.type,
    }
