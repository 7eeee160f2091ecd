"""The copy of a state to host memory, from which a checkpoint is written."""

from __future__ import annotations

from typing import Any

import torch

from ... import accelerator
from .portable import to_portable

__all__ = ("HostCopy", "cloned", "on_host")


def on_host(value: Any, where: str) -> Any:
    """Return `value` in portable form, with its tensors in host memory. Tensors already there are shared, not copied.

    Raises TypeError, which quotes `where`, for anything that `torch.load(weights_only=True)` would refuse.
    """
    return to_portable(value, where, _compact)


def cloned(value: Any) -> Any:
    """Return a copy of `value` in host memory, tensors included. A copy of loaded values does not keep their file."""
    return to_portable(value, "state", lambda tensor, where: tensor.to("cpu", copy=True))


class HostCopy:
    """A copy of a state in host memory. The next copy reuses its tensors, since new pages cost more than copying.

    It holds at most one copy. The last copy must not be in use when the next is taken.
    """

    def __init__(self) -> None:
        self._held: dict[str, torch.Tensor] = {}

    def take(self, value: Any, where: str) -> Any:
        """Return `value` as `on_host` does, but with every tensor copied."""
        held, self._held = self._held, {}
        sources: list[torch.Tensor] = []

        def place(tensor: torch.Tensor, where: str) -> torch.Tensor:
            copy = held.pop(where, None)
            if copy is None or (copy.shape, copy.dtype) != (tensor.shape, tensor.dtype):
                copy = torch.empty_like(
                    tensor,
                    device="cpu",
                    requires_grad=False,
                    pin_memory=tensor.device.type == accelerator.kind(),
                )
            copy.copy_(tensor, non_blocking=True)
            sources.append(tensor)
            self._held[where] = copy
            return copy

        copied = to_portable(value, where, place)
        for device in {tensor.device for tensor in sources}:
            accelerator.synchronize(device)
        return copied


def _compact(tensor: torch.Tensor, where: str) -> torch.Tensor:
    host = tensor.cpu()
    if host.layout is torch.strided and host.untyped_storage().nbytes() > host.numel() * host.element_size():
        # torch.save would write the whole storage of a view.
        return host.clone()
    return host
