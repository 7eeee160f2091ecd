"""Hooks that run when backward completes a gradient, after all other hooks of the parameter.

A hook of the user may change the gradient, for example clip it. torch calls hooks in the order of registration. torch's
DDP and Horovod run theirs later, as a hook of the autograd node, to which they must keep a reference.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import torch
from torch.utils.hooks import RemovableHandle

from ..compiling import not_compiled

__all__ = ("register_last_hook",)

Hook = Callable[[torch.Tensor], None]


def register_last_hook(tensor: torch.Tensor, hook: Hook) -> RemovableHandle:
    """Call hook(tensor) each time backward has completed the gradient of `tensor`, a leaf that requires gradients.

    It is called after the hooks of `register_post_accumulate_grad_hook`, also after those that are registered later.
    """
    hooks = tensor._post_accumulate_grad_hooks
    if not isinstance(hooks, _Hooks):
        tensor._post_accumulate_grad_hooks = hooks = _Hooks(hooks)
    handle = RemovableHandle(hooks)
    hooks.add_last(handle.id, hook)
    return handle


class _Hooks(OrderedDict[int, Hook]):
    """The hooks of a parameter by ID. torch adds a hook as an item, and calls the values in their order."""

    def __init__(self, earlier: dict[int, Hook] | None) -> None:
        """earlier: the hooks until now. The handles of their users remove them from that dictionary."""
        super().__init__()
        self._last: list[int] = []
        """The IDs of those that run after all others."""
        if earlier:

            @not_compiled
            def call_earlier(tensor: torch.Tensor) -> None:
                for hook in list(earlier.values()):
                    hook(tensor)

            self[-1] = call_earlier

    def add_last(self, number: int, hook: Hook) -> None:
        """Add a hook that stays the last one."""
        self._last = [*filter(self.__contains__, self._last), number]
        super().__setitem__(number, hook)

    def __setitem__(self, number: int, hook: Hook) -> None:
        super().__setitem__(number, hook)
        for last in self._last:
            if last in self:
                super().__setitem__(last, self.pop(last))
