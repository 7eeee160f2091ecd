"""Knowing which gradients hold something that the other ranks have not seen, without asking the user."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ("Accumulated",)

_VERSION = "_dualdist_version"
"""The attribute of a gradient that holds its version at the last look."""


class Accumulated:
    """One parameter, and how many backwards have added to its gradient since ranks combined theirs.

    Where that makes no difference (SyncOptions.needs_no_count) `passes` is 0 or 1, and the gradient's mark may be old.
    """

    def __init__(self, name: str, tensor: torch.Tensor) -> None:
        self.name = name
        self.tensor = tensor
        self.passes = 0
        self.hook: Any = None
        self.settle()

    def settle(self) -> None:
        """Take dtype and device as they are now for those that the parameter is to keep."""
        self._dtype, self._device = self.tensor.dtype, self.tensor.device

    def moved(self) -> str:
        """Return what has become of the parameter that must stay what it was, '' for nothing."""
        tensor = self.tensor
        if tensor.dtype is self._dtype and tensor.device == self._device:
            return ""
        return f"{self.name!r} went from {self._dtype} on {self._device} to {tensor.dtype} on {tensor.device}"

    def accumulated(self) -> bool:
        """Note one more backward; return whether it added to a gradient that was there already.

        The gradient carries its version at the last look: a new tensor has none, and one that was zeroed in between
        is two versions on.
        """
        grad: torch.Tensor = self.tensor.grad  # type: ignore[assignment]
        version = grad._version
        added = bool(getattr(grad, _VERSION, None) == version - 1)
        self.passes = self.passes + 1 if added else 1
        setattr(grad, _VERSION, version)
        return added

    def note(self) -> None:
        """Remember the gradient as it is now."""
        if self.tensor.grad is not None:
            setattr(self.tensor.grad, _VERSION, self.tensor.grad._version)

    def forget(self) -> None:
        """Leave the parameter to itself and keep its shape, without memory."""
        if self.hook is not None:
            self.hook.remove()
        old = self.tensor
        self.tensor = torch.empty_strided(old.size(), old.stride(), dtype=old.dtype, device=old.device)
        self.tensor.untyped_storage().resize_(0)
