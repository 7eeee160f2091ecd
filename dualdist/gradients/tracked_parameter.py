"""A parameter, and how much of its gradient the ranks have not combined yet."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ("TrackedParameter",)

_VERSION = "_dualdist_version"
"""The attribute of a gradient that holds its recorded version."""


class TrackedParameter:
    """One parameter, and how many backward passes added to its gradient since the ranks last combined it.

    If GradSync does not count passes (see its `set_passes`), `passes` is 0 or 1 and the recorded version may be old.
    """

    def __init__(self, name: str, tensor: torch.Tensor) -> None:
        self.name = name
        self.tensor = tensor
        self.passes = 0
        self.hook: Any = None
        self.record_placement()

    def record_placement(self) -> None:
        """Record the current dtype and device as the expected ones."""
        self.dtype, self.device = self.tensor.dtype, self.tensor.device

    def moved(self) -> str:
        """Return how dtype or device differ from the expected ones; '' when they do not."""
        tensor = self.tensor
        if tensor.dtype is self.dtype and tensor.device == self.device:
            return ""
        return (
            f"{self.name!r} changed from {self.dtype} on {self.device} to {tensor.dtype} on {tensor.device}"
        )

    def count_pass(self) -> bool:
        """Count one more backward pass; return whether it added to an existing gradient.

        It did when torch's version counter of the gradient is one above the recorded version. A new tensor has no
        recorded version, and a tensor that was zeroed in between is two versions ahead.
        """
        grad = self.tensor.grad
        if grad is None:  # a hook of the user has removed it
            self.passes += 1
            return False
        version = grad._version
        added = bool(getattr(grad, _VERSION, None) == version - 1)
        self.passes = self.passes + 1 if added else 1
        setattr(grad, _VERSION, version)
        return added

    def record_version(self) -> None:
        """Record the current version of the gradient."""
        if self.tensor.grad is not None:
            setattr(self.tensor.grad, _VERSION, self.tensor.grad._version)

    def release(self) -> None:
        """Remove the hook, and replace the parameter by a tensor of the same shape without memory."""
        if self.hook is not None:
            self.hook.remove()
        old = self.tensor
        self.tensor = torch.empty_strided(old.size(), old.stride(), dtype=old.dtype, device=old.device)
        self.tensor.untyped_storage().resize_(0)
