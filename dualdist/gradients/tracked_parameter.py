"""A parameter, and how much of its gradient the ranks have not combined yet."""

from __future__ import annotations

import weakref

import torch
from torch.utils.hooks import RemovableHandle


def as_real(tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor`, with complex numbers as (real, imaginary) pairs in a new last dimension."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


class TrackedParameter:
    """One parameter, and how many backward passes added to its gradient since the ranks last combined it.

    If GradSync does not count passes (see its `set_passes`), `passes` is 0 or 1.
    """

    def __init__(self, name: str, tensor: torch.Tensor) -> None:
        self.name = name
        self.tensor = tensor
        self.passes = 0
        self.is_given = True
        """Whether `.grad` may be memory that the script knows: it was set before the current backward."""
        self.hooks: list[RemovableHandle] = []
        self._unswappable = weakref.ref(tensor)
        """torch.utils.swap_tensors would take the hook away. It raises for a tensor with a weak reference."""
        self.record_placement()

    def record_placement(self) -> None:
        """Record the current shape, strides, dtype and device as the expected ones, on which the ranks agree."""
        tensor = self.tensor
        self.shape, self.device = tensor.shape, tensor.device
        self.dtype: torch.dtype = getattr(tensor, "grad_dtype", None) or tensor.dtype
        """Of the gradient. Newer releases of torch allow another one than the parameter's."""
        self._is_on_cpu = self.device.type == "cpu"
        dtype = torch.uint8 if tensor.is_quantized else self.dtype  # those have no gradient
        self.like = as_real(torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device="meta"))
        """A gradient without memory, with complex numbers as pairs."""

    def fits(self, grad: torch.Tensor) -> bool:
        """Return whether a gradient has the expected shape, dtype and device."""
        if grad.dtype is not self.dtype or grad.shape != self.shape:
            return False
        return (
            grad.is_cpu if self._is_on_cpu else grad.device == self.device
        )  # `is_cpu` takes a third of the time

    def moved(self) -> str:
        """Return how shape, dtype or device differ from the expected ones; '' when they do not."""
        tensor = self.tensor
        dtype = getattr(tensor, "grad_dtype", None) or tensor.dtype
        if tensor.shape != self.shape:
            return f"{self.name!r} changed its shape from {tuple(self.shape)} to {tuple(tensor.shape)}"
        if dtype is not self.dtype or tensor.device != self.device:
            return f"{self.name!r} changed from {self.dtype} on {self.device} to {dtype} on {tensor.device}"
        return ""

    def release(self) -> None:
        """Remove the hook, and replace the parameter by a tensor of the same shape without memory."""
        for hook in self.hooks:
            hook.remove()
        old = self.tensor
        self.tensor = torch.empty_strided(old.size(), old.stride(), dtype=old.dtype, device=old.device)
        self.tensor.untyped_storage().resize_(0)
