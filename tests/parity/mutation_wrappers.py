"""One rank's training script with the other ranks: through dualdist, or through a naive wrapper."""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from typing import Any

import torch

import dualdist as hvd

from .mutation_model import Pass, Replica, dense
from .mutation_oracle import may_fill, write

__all__ = ("Distributed", "Naive", "has_no_sync")


def has_no_sync(style: str) -> bool:
    """Return whether the wrapper of a style has `no_sync`."""
    from dualdist.training.optimizer import SynchronizedOptimizer

    return style == "module" or hasattr(SynchronizedOptimizer, "no_sync")


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
                    net,
                    bucket_cap_mb=setup.bucket_cap_mb,
                    process_group=None if setup.members is None else process_set,
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


class Naive(Replica):
    """A script that combines gradients itself, parameter by parameter, after backward and before a step."""

    def wrap(self) -> None:
        self.process_set = process_set_of(self.setup.members)
        self.is_member = self.process_set.included()
        self.of_set = {"process_set": self.process_set}
        is_module = self.setup.style == "module"
        keys = self.shares()
        if is_module:
            keys = [[key for key in self.params if int(key[0]) == place] for place in range(len(self.nets))]
        self.units = [set(share) for share in keys]
        self.passes: list[Counter[str]] = [Counter() for _ in keys]
        self.since_step: list[set[str]] = [set() for _ in keys]
        self.left_out: list[set[str]] = [set() for _ in keys]
        """What no backward on any rank has reached since the last step, although a rank trains it."""
        self.trained: set[str] = set()
        """What has required a gradient at a backward or step of this rank."""
        self.is_first = [not is_module for _ in keys]
        """Whether nothing has been combined since the last step, after which everything is."""
        self.pending: set[str] = set()
        """What the current backward has reached."""
        self.handles: list[Any] = []
        if self.setup.equal_start and self.is_member:
            hvd.broadcast_parameters(self.params, root_rank=self.setup.ranks[0], process_set=self.process_set)

    def backward(self, one: Pass) -> None:
        self.watch()
        super().backward(one)

    def watch(self) -> None:
        if self.setup.style == "optimizer":  # a group may have been added
            for number, optimizer in enumerate(self.optimizers):
                own = {id(param) for group in optimizer.param_groups for param in group["params"]}
                self.units[number] = {key for key, param in self.params.items() if id(param) in own}
        self.trained |= {key for key, param in self.params.items() if param.requires_grad}
        for handle in self.handles:
            handle.remove()
        self.handles = [
            param.register_post_accumulate_grad_hook(lambda _, key=key: self.pending.add(key))
            for key, param in self.params.items()
            if param.requires_grad
        ]

    def after_pass(self, syncs: bool) -> None:
        if not self.is_member:
            return
        for number, unit in enumerate(self.units):
            reached = self.pending & unit
            self.passes[number].update(reached)
            if syncs and any(self.passes[number][key] >= self.setup.passes for key in reached):
                self.combine(number)
        self.pending.clear()

    def before_step(self, number: int) -> None:
        if self.setup.style == "module" or not self.is_member:
            return
        self.watch()
        if self.is_first[number] or any(self.passes[number].values()):
            self.combine(number, in_step=True)
        left = self.left_out[number]
        grads = [self.params[key].grad for key in left]
        if any(
            hvd.allgather_object(any(g is not None and bool(dense(g).any()) for g in grads), **self.of_set)
        ):
            self.passes[number].update(left)
            self.combine(number)
        for key in self.units[number]:
            if may_fill(self.params[key], key in self.since_step[number]):
                self.params[key].grad = torch.zeros_like(self.params[key])
        self.since_step[number].clear()
        self.is_first[number] = True

    @torch.no_grad()
    def combine(self, number: int, *, in_step: bool = False) -> None:
        """Combine what a backward on some rank has reached since the last combination, and some rank has."""
        own = {key for key, count in self.passes[number].items() if count}
        there = {key for key in self.units[number] if self.params[key].grad is not None}
        is_first, is_last = self.is_first[number], self.is_first[number] and in_step
        waits = set() if is_last else self.units[number] & self.trained
        everything = hvd.allgather_object((own, there, waits, there - waits), **self.of_set)
        reached, found, waiting, others = (set().union(*sets) for sets in zip(*everything, strict=True))
        left_out = waiting - reached - others
        wanted = reached | found if is_first else reached
        if self.setup.sums or self.setup.comm_hook:
            wanted -= left_out
        keys = sorted(wanted & found)
        self.left_out[number] = left_out if is_first else left_out & self.left_out[number]
        self.is_first[number] = False
        grads = []
        for key in keys:
            param = self.params[key]
            grad = torch.zeros_like(param) if param.grad is None else param.grad
            grads.append(grad.to_dense() if grad.is_sparse else grad)
        op = hvd.Sum if self.setup.sums else hvd.Average
        flat = [torch.view_as_real(grad) if grad.is_complex() else grad for grad in grads]
        results = [
            hvd.allreduce(grad.clone(), op=op, process_set=self.process_set) if grad.numel() else grad
            for grad in flat
        ]
        for key, result in zip(keys, results, strict=True):
            param = self.params[key]
            combined = torch.view_as_complex(result) if param.is_complex() else result
            write(param, combined, sparse=self.is_sparse(key))
        self.passes[number].clear()
        self.since_step[number].update(keys)
