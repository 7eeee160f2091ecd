"""The arithmetic of reductions, for allreduce, reducescatter, reduce and gradients, on any Group.

The rule is Horovod's: out = postscale * reduce(prescale * x). Average is Sum with postscale / size
(horovod/common/ops/gloo_operations.cc:162, collective_operations.cc:64), also while ranks have joined. Integers are
scaled in double precision and truncated toward zero; an average of integers is an exact division. Compression casts
what is sent, and casts the result back, with the interface of horovod/torch/compression.py.
"""

from __future__ import annotations

import ctypes
import functools
import math
import operator
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import torch

from .. import needed
from ..agreement.call import Call
from ..agreement.connections import payload_capacity
from ..backends.base import Group
from ..checks import number, shown, wrong
from ..types import REDUCE_OP_NAMES, TORCH_OP_NAMES, Adasum, Average, Max, Min, Product, Sum
from .wire import dtype_name

# The numbers that can be reduced. They are sent in a dtype that the backend can reduce: their own one if possible, else
# bool and small integers as int32, bfloat16 as float32, and complex numbers as pairs.

REDUCED_AS = {
    **{dtype: dtype for dtype in (torch.float16, torch.float32, torch.float64, torch.int32, torch.int64)},
    **dict.fromkeys((torch.bool, torch.uint8, torch.int8, torch.int16), torch.int32),
    **dict.fromkeys((torch.bfloat16, torch.complex64, torch.complex32), torch.float32),
    torch.complex128: torch.float64,
}
"""Each dtype that can be reduced -> one that every backend reduces: itself or a wider one."""


@functools.cache
def check_reducible(dtype: torch.dtype, op: int) -> None:
    """Raise ValueError unless `op` can reduce numbers of `dtype`."""
    name, kind = REDUCE_OP_NAMES[op], dtype_name(dtype)
    if dtype not in REDUCED_AS:
        raise ValueError(f"`tensor` must be of a dtype that can be reduced, but is {kind} instead. Convert it first.")
    if dtype is torch.bool and op in (Average, Adasum):
        raise ValueError(f"`op` must be Sum, Min, Max or Product for bool, but is {name} instead.")
    if dtype.is_complex and op not in (Average, Sum):
        raise ValueError(f"`op` must be Average or Sum for {kind}, but is {name} instead.")
    if op == Adasum and not dtype.is_floating_point:
        raise ValueError(f"`tensor` must be of a floating-point dtype for Adasum, but is {kind} instead.")


def wire_dtype(dtype: torch.dtype, group: Group, reduction: Reduction | None = None) -> torch.dtype:
    """Return the dtype in which `group` reduces numbers of `dtype`: their own one, or a wider one.

    If `reduction` computes more from the reduced numbers, small integers and bfloat16 always need a wider one.
    """
    if (wider := REDUCED_AS[dtype]) is dtype or dtype not in group.reduce_dtypes:
        return wider
    if reduction is not None and dtype.is_floating_point:
        return wider if reduction.op == Adasum else dtype
    scales = reduction is not None and (reduction.op == Average or reduction != Reduction(reduction.op))
    return wider if scales else dtype


def neutral(dtype: torch.dtype, op: int) -> float | int:
    """Return the neutral element of `op`, which a rank that has joined contributes. dtype: one that a group reduces."""
    if op in (Sum, Average, Adasum):
        return 0
    if op == Product:
        return 1
    sign = {Min: 1, Max: -1}[op]
    if dtype.is_floating_point:
        return sign * math.inf
    info = torch.iinfo(dtype)
    return info.max if op == Min else info.min


_TORCH_MODULES = ("torch._C._distributed_c10d", "torch.distributed.distributed_c10d")
"""Where the classes of torch's ops are. They are recognised by name, because torch.distributed may be missing."""


def reduce_op(op: Any) -> int:
    """Return Horovod's constant for `op`, which is one of these constants or of torch.distributed.ReduceOp."""
    if type(op) is int and 0 <= op < len(REDUCE_OP_NAMES):
        return op
    is_torch_op = type(op).__module__ in _TORCH_MODULES and type(op).__name__ in ("ReduceOp", "RedOpType")
    name = getattr(op, "op", op).name if is_torch_op else None
    if is_torch_op and name in TORCH_OP_NAMES:
        return TORCH_OP_NAMES.index(name)
    raise ValueError(
        f"`op` must be {', '.join(REDUCE_OP_NAMES[:-1])} or {REDUCE_OP_NAMES[-1]}, but is "
        f"{f'torch.distributed.ReduceOp.{name}' if name else shown(op)} instead. Pass hvd.Sum and so on, or "
        f"{', '.join(filter(None, TORCH_OP_NAMES))} of torch.distributed.ReduceOp."
    )


class Reduction(NamedTuple):
    """The op and the factors of a reduction."""

    op: Any = Average
    """A constant of Horovod; before `checked`, what a user has passed, which may be None."""
    prescale_factor: float = 1.0
    postscale_factor: float = 1.0

    def checked(self) -> Reduction:
        """Return the Reduction that a user means by these arguments. Raises ValueError or TypeError."""
        op, prescale, postscale = self
        if type(prescale) is type(postscale) is float and prescale == postscale == 1.0:
            return self if type(op) is int and 0 <= op < len(REDUCE_OP_NAMES) else Reduction(reduce_op(op))
        return Reduction(reduce_op(op), number("prescale_factor", prescale), number("postscale_factor", postscale))

    @classmethod
    def of(cls, call: Call) -> Reduction:
        """Return the Reduction in the arguments of `call`."""
        arguments = dict(call.arguments)
        factors = arguments["prescale_factor"], arguments["postscale_factor"]
        return cls(REDUCE_OP_NAMES.index(arguments["op"]), *factors)

    def check(self, tensors: Sequence[torch.Tensor], size: int) -> None:
        """Raise ValueError or NotImplementedError unless it can be applied to `tensors` of `size` ranks."""
        for tensor in tensors:
            check_reducible(tensor.dtype, self.op)
        if self.op == Adasum:
            needed("adasum").check_size(size)

    def describe(self, tensors: Sequence[torch.Tensor]) -> dict[str, Any]:
        """Return the arguments of a reduction of `tensors` for its Call, in the order in which errors show them."""
        # `device` costs ten times as much as `is_cpu`.
        kind = "cpu" if tensors[0].is_cpu else tensors[0].device.type
        return _described(tuple(map(_shape_and_dtype, tensors)), kind, self)


_shape_and_dtype = operator.attrgetter("shape", "dtype")


@functools.lru_cache(maxsize=1024)
def _described(
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


def pack(tensors: Sequence[torch.Tensor], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return the numbers of `tensors` concatenated, (n,) of `dtype` on `device`; always a copy."""
    flat = [
        (torch.view_as_real(t.resolve_conj()) if t.is_complex() else t).detach().reshape(-1).to(device, dtype)
        for t in tensors
    ]
    return torch.cat(flat)


def unpack(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    """Write the numbers of `flat` into `tensors`, the reverse of `pack`; integers wrap around as in torch."""
    start = 0
    for tensor in tensors:
        target = tensor.detach()  # so that autograd does not record the copy
        length = target.numel() * (2 if target.is_complex() else 1)
        part = flat if len(tensors) == 1 else flat[start : start + length]
        if target.is_complex():
            # The target may be conjugated when it is read, so it has no view as pairs.
            part = torch.view_as_complex(part.view(target.numel(), 2))
        part = part if target.dim() == 1 else part.view(target.shape)
        target.copy_(part != 0 if target.dtype is torch.bool else part)
        start += length


def reduce_tensors(
    group: Group, tensors: Sequence[torch.Tensor], reduction: Reduction, *, contributes: bool = True
) -> None:
    """Reduce `tensors` in place over `group`, those of equal dtype and device in one operation.

    contributes: if False, send numbers that change no result; `tensors` only give the shapes, and are overwritten.
    """
    by_kind: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = defaultdict(list)
    for tensor in tensors:
        by_kind[tensor.dtype, tensor.device].append(tensor)
    for (dtype, device), same_kind in by_kind.items():
        wire = wire_dtype(dtype, group, reduction), group.wire_device(device)
        first = same_kind[0]
        in_place = len(same_kind) == 1 and first.is_contiguous() and (dtype, device) == wire
        flat = first.detach().view(-1) if in_place else pack(same_kind, *wire)
        if contributes:
            scale_(flat, reduction.prescale_factor)
        else:
            flat.fill_(neutral(flat.dtype, reduction.op))
        if reduction.op == Adasum:
            needed("adasum").combine(group, flat.split([tensor.numel() for tensor in same_kind]))
        else:
            group.allreduce_(flat, Sum if reduction.op == Average else reduction.op).wait()
        _finish(flat, reduction, group.size)
        if not in_place:
            unpack(flat, same_kind)


def _finish(flat: torch.Tensor, reduction: Reduction, size: int) -> None:
    """Turn the sum of the prescaled numbers into the result, in place."""
    if reduction.op != Average:
        scale_(flat, reduction.postscale_factor)
    elif flat.is_floating_point() or reduction.postscale_factor != 1.0:
        scale_(flat, reduction.postscale_factor / size)
    else:
        flat.copy_(torch.div(flat, size, rounding_mode="trunc"))


def bytes_of(tensor: torch.Tensor) -> bytes:
    """Return the numbers of `tensor`, which is on the CPU.

    Not with `numpy()`: after it, torch refuses for ever to resize the tensor's memory, which may be the user's.
    """
    is_plain = tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())
    sent = tensor if is_plain else tensor.detach().resolve_conj().resolve_neg().contiguous()
    return ctypes.string_at(sent.data_ptr(), sent.nbytes)


def payload_of(group: Group, tensors: Sequence[torch.Tensor], reduction: Reduction) -> bytes:
    """Return the prescaled numbers of `tensors`, to be sent with the agreement. b"": they cannot be sent with it."""
    first = tensors[0]
    if not first.is_cpu or reduction.op == Adasum:
        return b""
    if len(tensors) > 1 and any(tensor.dtype != first.dtype for tensor in tensors):
        return b""
    dtype = wire_dtype(first.dtype, group, reduction)
    numel = sum([tensor.numel() for tensor in tensors]) * (2 if first.is_complex() else 1)
    if numel * dtype.itemsize > payload_capacity(group.size):
        return b""
    if len(tensors) == 1 and dtype is first.dtype and reduction.prescale_factor == 1.0:
        return bytes_of(first)
    flat = pack(tensors, dtype, first.device)
    scale_(flat, reduction.prescale_factor)
    return bytes_of(flat)


def reduce_payloads(
    group: Group, payloads: Sequence[bytes], tensors: Sequence[torch.Tensor], reduction: Reduction
) -> None:
    """Overwrite `tensors` with the reduction of all members' payloads, bitwise equal on all members."""
    dtype = wire_dtype(tensors[0].dtype, group, reduction)
    rows = torch.frombuffer(bytearray().join(payloads), dtype=dtype).view(len(payloads), -1)
    if reduction.op in (Min, Max):
        flat = (torch.amin if reduction.op == Min else torch.amax)(rows, dim=0)
    else:
        combine = {Product: torch.prod, Sum: torch.sum, Average: torch.sum}[reduction.op]
        flat = combine(rows, dim=0, dtype=dtype)
    _finish(flat, reduction, group.size)
    unpack(flat, tensors)


def scale_(flat: torch.Tensor, factor: float) -> None:
    """Multiply in place; integers in double precision, truncated toward zero."""
    if factor == 1.0:
        return
    if flat.is_floating_point():
        flat.mul_(factor)
    else:
        flat.copy_(flat.double().mul_(factor).to(flat.dtype))


class Compressor:
    """Sends tensors as they are; the base class of compressors."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype | None]:
        """Return the tensor to send, and the `ctx` of `decompress`."""
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: torch.dtype | None) -> torch.Tensor:
        """Return `tensor` with the dtype that it had before `compress`."""
        return tensor


class _Cast(Compressor):
    sent: ClassVar[torch.dtype]

    @classmethod
    def compress(cls, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype | None]:
        return (tensor.to(cls.sent) if tensor.dtype.is_floating_point else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: torch.dtype | None) -> torch.Tensor:
        return tensor if ctx is None else tensor.to(ctx)


class _Float16(_Cast):
    sent = torch.float16


class _BFloat16(_Cast):
    sent = torch.bfloat16


Restore = Callable[[tuple[torch.Tensor, ...]], tuple[torch.Tensor, ...]]


def compressed(tensors: list[torch.Tensor], compression: Any) -> tuple[list[torch.Tensor], Restore]:
    """Return the compressed `tensors`, and what decompresses as many results. compression: another than none."""
    compression = checked_compression(compression)
    pairs = [compression.compress(tensor) for tensor in tensors]
    return [sent for sent, _ in pairs], lambda outputs: tuple(
        [compression.decompress(output, ctx) for output, (_, ctx) in zip(outputs, pairs, strict=True)]
    )


def checked_compression(compression: Any) -> Any:
    """Return `compression`, or its class if that is one of `Compression`. Raise TypeError unless it is a Compressor."""
    if not all(callable(getattr(compression, name, None)) for name in ("compress", "decompress")):
        raise wrong(
            "compression",
            "Compression.none, fp16 or bf16, or have compress() and decompress() as these",
            compression,
            error=TypeError,
        )
    kind = type(compression)
    return kind if kind in (Compression.none, Compression.fp16, Compression.bf16) else compression


class Compression:
    """The compressors: `none`, `fp16` and `bf16`. They cast only floating-point tensors."""

    none = Compressor
    fp16 = _Float16
    bf16 = _BFloat16
