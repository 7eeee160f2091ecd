"""What a data-parallel module shares with torch.distributed: process groups, the Join context, and its own class.

Nothing here communicates, except `notify_join`. All of it works without a process group of torch, too.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.nn.parallel.distributed import DistributedDataParallel, _BufferCommHookLocation

__all__ = (
    "builtin_comm_hook",
    "disabled_join",
    "group_of_mesh",
    "join_hook",
    "notify_join",
    "ranks_of",
    "register_data_parallel",
    "register_fused_optimizer",
    "runs_after_forward",
    "take_over_optimizers",
    "torch_data_parallel",
    "warns_of_broadcast_buffers",
    "world_group",
)


def torch_data_parallel() -> type[torch.nn.Module]:
    """Return torch's own DistributedDataParallel."""
    return DistributedDataParallel


def register_data_parallel(kind: type[torch.nn.Module]) -> None:
    """Let instances of `kind` pass isinstance() for torch's DistributedDataParallel and Joinable, which are ABCs."""
    DistributedDataParallel.register(kind)


def world_group() -> Any:
    """Return torch's group of the whole world, None if torch.distributed does not run."""
    import torch.distributed as dist

    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None


def ranks_of(group: Any) -> list[int] | None:
    """Return the global ranks of a process group of torch, None if `group` is something else."""
    import torch.distributed as dist

    if not dist.is_available() or not isinstance(group, dist.ProcessGroup):
        return None
    return list(dist.get_process_group_ranks(group))


def group_of_mesh(mesh: Any) -> Any:
    """Return the group of a DeviceMesh with one dimension, None if `mesh` is something else."""
    if not hasattr(mesh, "get_group") or getattr(mesh, "ndim", 0) != 1:
        return None
    return mesh.get_group(mesh_dim=0)


def disabled_join() -> Any:
    """Return the configuration of a Joinable that no Join context uses."""
    from torch.distributed.algorithms.join import _JoinConfig

    return _JoinConfig.construct_disabled_join_config()


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


def warns_of_broadcast_buffers() -> bool:
    """Return whether torch's class has replaced the argument `broadcast_buffers` (2.13 and later)."""
    return "forward_sync_buffers" in inspect.signature(DistributedDataParallel.__init__).parameters


def runs_after_forward(location: Any) -> bool:
    """Return whether a hook for buffers runs after forward. location: a _BufferCommHookLocation, None: the default."""
    return location is None or location == _BufferCommHookLocation.POST_FORWARD


def builtin_comm_hook(kind: Any) -> Callable[[Any, Any], Any]:
    """Return the hook in Python that does what torch's built-in hook of `kind` does. Raises TypeError.

    kind: a torch.distributed.BuiltinCommHookType.
    """
    import torch.distributed as dist
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    kinds = dist.BuiltinCommHookType
    hooks = {
        kinds.ALLREDUCE: default_hooks.allreduce_hook,
        kinds.FP16_COMPRESS: default_hooks.fp16_compress_hook,
    }
    if kind not in hooks:
        raise TypeError(
            f"`comm_hook_type` must be one of {[str(known) for known in hooks]}, but is {kind!r} instead."
        )

    def hook(state: Any, bucket: Any) -> Any:
        return hooks[kind](state, bucket)

    hook.__qualname__ = str(kind)
    return hook


def register_fused_optimizer(wrapper: Any, kind: type, *args: Any, **kwargs: Any) -> None:
    """Have an optimizer step in a communication hook of `wrapper`, by torch's method of this purpose."""
    DistributedDataParallel._register_fused_optim(wrapper, kind, *args, **kwargs)
