"""What DistributedDataParallel uses of torch's: the Join context, communication hooks, optimizers in backward.

And hooks for buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist


def notify_join(joinable: Any) -> None:
    """Report to the ranks that have left the Join context that this rank starts another iteration. Collective."""
    from torch.distributed.algorithms.join import Join

    Join.notify_join_context(joinable)


def join_hook(main: Callable[[], None], post: Callable[[bool], None]) -> Any:
    """Return a JoinHook: `main` shadows one iteration, `post` gets whether this rank was one of the last to join."""
    from torch.distributed.algorithms.join import JoinHook

    class Hook(JoinHook):
        def main_hook(self) -> None:
            main()

        def post_hook(self, is_last_joiner: bool) -> None:
            post(is_last_joiner)

    return Hook()


def take_over_optimizers(params: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return the parameters whose optimizers step in backward, and remove torch's hooks that would call them.

    torch.distributed.optim._apply_optimizer_in_backward registers these hooks (apply_optimizer_in_backward.py).
    """
    found = [param for param in params if hasattr(param, "_in_backward_optimizers")]
    if found:
        from torch.distributed.optim.apply_optimizer_in_backward import param_to_optim_hook_handle_map

        for param in found:
            for handle in param_to_optim_hook_handle_map.get(param, ()):
                handle.remove()
    return found


def builtin_comm_hook(kind: Any) -> Callable[[Any, Any], Any]:
    """Return the hook in Python that does what torch's built-in hook of `kind` does. Raises TypeError.

    kind: a torch.distributed.BuiltinCommHookType.
    """
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    kinds = dist.BuiltinCommHookType
    hooks = {
        kinds.ALLREDUCE: default_hooks.allreduce_hook,
        kinds.FP16_COMPRESS: default_hooks.fp16_compress_hook,
    }
    if kind not in hooks:
        raise TypeError(f"`comm_hook_type` must be one of {[str(known) for known in hooks]}, but is {kind!r} instead.")

    def hook(state: Any, bucket: Any) -> Any:
        return hooks[kind](state, bucket)

    hook.__qualname__ = str(kind)
    return hook


@dataclass
class BufferHook:
    """A hook of the user that synchronizes buffers in place of copying rank 0's, and its state."""

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
        while self._futures:
            self._futures.pop(0).wait()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_futures": []}
