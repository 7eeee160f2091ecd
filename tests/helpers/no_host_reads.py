"""Makes everything by which the host reads the data of a tensor, or copies data to its device, raise an error.

On a GPU each of these waits until the GPU has done all its work. The block therefore treats all tensors as if they were
on a GPU. Only those that `torch.tensor` makes in the block count as host memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import dualdist.core.collectives.broadcast as broadcast_module
import dualdist.core.collectives.reduction as reduction_module
import dualdist.sync_batch_norm as rows_module

_METHODS = (
    "__array__ __bool__ __complex__ __contains__ __float__ __index__ __int__ __repr__ cpu is_nonzero item numpy tolist"
).split()
_aten = torch.ops.aten
_READS = {
    _aten._local_scalar_dense.default,
    _aten.equal.default,
    _aten.is_nonzero.default,
    _aten.item.default,
    _aten.masked_select.default,
    _aten.nonzero.default,
    _aten._unique2.default,
}
"""Operations whose result, or its shape, the host reads."""


class HostRead(AssertionError):
    """The host read a tensor, or copied between host and device."""


class _Watch(TorchDispatchMode):
    """Raises HostRead in operations that read a tensor, and in copies from or to another device."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._host: dict[int, torch.Tensor] = {}
        """Tensors in pageable host memory, by address. They are kept so that no other tensor gets the address."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READS and not self._is_host(args[0]):
            raise HostRead(f"{func} reads a tensor")
        if func in (_aten.copy_.default, _aten._foreach_copy_.default):
            targets, sources = tree_leaves(args[0]), tree_leaves(args[1])
            for target, source in zip(targets, sources, strict=True):
                if target.device != source.device or self._is_host(source) > self._is_host(target):
                    raise HostRead(f"{func} copies from {source.device} to {target.device}, from host memory")
        result = func(*args, **(kwargs or {}))
        if func is _aten._to_copy.default and result.device != args[0].device:
            raise HostRead(f"{func} copies from {args[0].device} to {result.device}")
        if func is _aten.lift_fresh.default:  # torch.tensor
            self._host[result.untyped_storage().data_ptr()] = result
        return result

    def _is_host(self, tensor: torch.Tensor) -> bool:
        return tensor.layout is torch.strided and tensor.untyped_storage().data_ptr() in self._host


def _raising(name: str) -> Callable[..., NoReturn]:
    def read(*args: Any, **kwargs: Any) -> NoReturn:
        raise HostRead(f"{name}() reads a tensor")

    return read


@contextlib.contextmanager
def no_host_reads() -> Iterator[None]:
    """Raise HostRead in the `with` block when the host reads a tensor. The methods raise in all threads."""
    with pytest.MonkeyPatch.context() as patch, _Watch():
        for name in _METHODS:
            patch.setattr(torch.Tensor, name, _raising(name))
        # A small tensor on the CPU travels with the agreement, as bytes; one on a GPU does not.
        for module in (reduction_module, rows_module):
            patch.setattr(module, "payload_capacity", lambda size, most=0: 0)
        patch.setattr(broadcast_module, "_MOST_BYTES", 0)
        yield


def can_watch() -> bool:
    """Return whether this torch can view a tensor with another dtype in a dispatch mode and in inference mode.

    torch 2.4 raises "Cannot set version_counter for inference tensor". The exchange through shared memory does it.
    """
    tensor = torch.zeros(4, dtype=torch.uint8)
    with _Watch(), torch.inference_mode(), contextlib.suppress(RuntimeError):
        tensor.view(torch.float32)
        return True
    return False
