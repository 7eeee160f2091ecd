"""Buffers of a DistributedDataParallel: rank 0's are copied to all ranks, or a hook of the user synchronizes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ..backends.torch_interface import runs_after_forward
from ..checks import wrong

__all__ = ("BufferHook", "checked_buffer_hook")


@dataclass
class BufferHook:
    """A hook that synchronizes buffers, and its state."""

    hook: Callable[[Any, dict[str, torch.Tensor]], Any]
    """hook(state, buffers) changes the buffers in place. It may return futures."""
    state: Any
    after_forward: bool
    """Whether it is called after forward, not before."""
    _futures: list[Any] = field(default_factory=list)

    def run(self, buffers: Mapping[str, torch.Tensor]) -> None:
        """Call the hook. Collective if the hook is."""
        self.wait()
        with torch.no_grad():
            self._futures = list(self.hook(self.state, dict(buffers)) or ())

    def wait(self) -> None:
        """Wait for the futures that the hook has returned."""
        futures, self._futures = self._futures, []
        for future in futures:
            future.wait()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_futures": []}


def checked_buffer_hook(state: Any, hook: Any, location: Any) -> BufferHook:
    """Return a BufferHook. Raises TypeError."""
    if not callable(hook):
        raise wrong(
            "hook", "a function of a state and a dict of buffers", hook, "Pass a function.", TypeError
        )
    return BufferHook(hook, state, runs_after_forward(location))
