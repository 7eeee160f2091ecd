"""The wire format: conversion between users' tensors and flat, contiguous tensors that every backend accepts.

Data that is only moved is sent as bytes, so every dtype works on every backend. Data that is reduced is sent in a dtype
that the backend can reduce: its own one if possible, else bool and small integers as int32, bfloat16 as float32, and
complex numbers as pairs.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Sequence

import torch

from ..backends.base import Group
from ..types import REDUCE_OP_NAMES, Adasum, Average, Max, Min, Product, Sum

_WIDER = {
    torch.bool: torch.int32,
    torch.uint8: torch.int32,
    torch.int8: torch.int32,
    torch.int16: torch.int32,
    torch.bfloat16: torch.float32,
    torch.complex64: torch.float32,
    torch.complex128: torch.float64,
    torch.complex32: torch.float32,
}
NUMPY_DTYPES = frozenset({torch.float16, torch.float32, torch.float64, torch.int32, torch.int64})
"""The dtypes that every backend reduces and NumPy has, too."""


def as_bytes(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    """Return the numbers of `tensor` as ((n,), uint8) on the wire device; a view if possible."""
    sent = tensor.detach().to(group.wire_device(tensor.device)).resolve_conj().resolve_neg().contiguous()
    # A tensor with one element is contiguous with any stride, but torch views it as bytes only with stride 1.
    return sent.as_strided((sent.numel(),), (1,)).view(torch.uint8)


def bytes_of(tensor: torch.Tensor) -> bytes:
    """Return the numbers of `tensor`, which is on the CPU.

    Not with `numpy()`: after it, torch refuses for ever to resize the tensor's memory, which may be the user's.
    """
    sent = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return ctypes.string_at(sent.data_ptr(), sent.nbytes)


def from_bytes(data: torch.Tensor, shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    """Return ((n,), uint8) as a tensor of `shape` with the dtype and on the device of `like`."""
    if data.storage_offset() % like.element_size():
        data = data.clone()
    return data.view(like.dtype).reshape(tuple(shape)).to(like.device)


@functools.cache
def check_reducible(dtype: torch.dtype, op: int) -> None:
    """Raise ValueError unless `op` can reduce numbers of `dtype`."""
    name, kind = REDUCE_OP_NAMES[op], str(dtype).removeprefix("torch.")
    if dtype not in _WIDER and dtype not in NUMPY_DTYPES:
        raise ValueError(
            f"`tensor` must be of a dtype that can be reduced, but is {kind} instead. Convert it first."
        )
    if dtype is torch.bool and op in (Average, Adasum):
        raise ValueError(f"`op` must be Sum, Min, Max or Product for bool, but is {name} instead.")
    if dtype.is_complex and op not in (Average, Sum):
        raise ValueError(f"`op` must be Average or Sum for {kind}, but is {name} instead.")
    if op == Adasum and not dtype.is_floating_point:
        raise ValueError(f"`tensor` must be of a floating-point dtype for Adasum, but is {kind} instead.")


def reduction_dtype(dtype: torch.dtype, group: Group, *, widens: bool = False) -> torch.dtype:
    """Return the dtype in which `group` reduces numbers of `dtype`.

    widens: whether small integers and bfloat16 need a wider one, because more is computed from the reduced numbers.
    """
    if dtype in group.reduce_dtypes and not (widens and dtype in _WIDER):
        return dtype
    return _WIDER[dtype]


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
        target = torch.view_as_real(target) if target.is_complex() else target
        part = flat if len(tensors) == 1 else flat[start : start + target.numel()]
        part = part if target.dim() == 1 else part.view(target.shape)
        target.copy_(part != 0 if target.dtype is torch.bool else part)
        start += target.numel()


def neutral(dtype: torch.dtype, op: int) -> float | int:
    """Return the neutral element of `op`, which a rank that has joined contributes."""
    if op in (Sum, Average, Adasum):
        return 0
    if op == Product:
        return 1
    sign = {Min: 1, Max: -1}[op]
    if dtype.is_floating_point:
        return sign * math.inf
    if dtype is torch.bool:
        return op == Min
    info = torch.iinfo(dtype)
    return info.max if op == Min else info.min
