"""One rank's training script with the other ranks, through dualdist."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch

import dualdist as hvd

from .mutation_model import Replica


@functools.cache
def process_set_of(ranks: tuple[int, ...] | None) -> Any:
    return hvd.global_process_set if ranks is None else hvd.add_process_set(ranks)


class Distributed(Replica):
    """A script that uses dualdist."""

    def wrap(self) -> None:
        setup, process_set = self.setup, process_set_of(self.setup.members)
        self.process_set = process_set
        self.wrapped: list[Any] = list(self.nets)
        hook = None
        if setup.comm_hook:
            from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

            hook = allreduce_hook
        if setup.style == "module":
            for number, net in enumerate(self.nets):
                self.wrapped[number] = hvd.DistributedDataParallel(
                    net, bucket_cap_mb=setup.bucket_cap_mb, process_group=None if setup.members is None else process_set
                )
                if hook is not None:
                    self.wrapped[number].register_comm_hook(None, hook)
            return
        if setup.equal_start and process_set.included():
            hvd.broadcast_parameters(self.params, root_rank=setup.ranks[0], process_set=process_set)
        for optimizer in self.optimizers:
            own = [param for group in optimizer.param_groups for param in group["params"]]
            groups: Any = setup.groups
            if groups == "lists":
                groups = [own[::2], own[1::3][:2]]
                groups = [[p for p in own if any(p is q for q in group)] for group in groups]
                groups[1] = [p for p in groups[1] if all(p is not q for q in groups[0])]
            hvd.DistributedOptimizer(
                optimizer,
                named_parameters=self.params.items(),
                compression=getattr(hvd.Compression, setup.compression),
                backward_passes_per_step=setup.passes,
                op=hvd.Sum if setup.sums else hvd.Average,
                gradient_predivide_factor=setup.predivide,
                groups=groups,
                sparse_as_dense=setup.sparse_as_dense,
                process_set=process_set,
                comm_hook=hook,
            )

    def call(self, number: int, *inputs: Any) -> torch.Tensor:
        loss: torch.Tensor = self.wrapped[number](*inputs)
        return loss

    @contextlib.contextmanager
    def syncing(self, syncs: bool) -> Any:
        with contextlib.ExitStack() as stack:
            if not syncs:
                for wrapper in self.wrapped if self.setup.style == "module" else self.optimizers:
                    stack.enter_context(wrapper.no_sync())
            yield
