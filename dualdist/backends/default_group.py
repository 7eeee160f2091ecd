"""Leaving torch.distributed's default process group.

Some functions of torch have the group as the default value of a parameter, if their module is imported after the group
was made; torch.distributed.algorithms.ddp_comm_hooks imports such a module. The functions would keep the group, and
with Gloo its connections, so that other ranks would wait for this one. In the next world they would use the old group.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from types import FunctionType

import torch.distributed as dist

__all__ = ("forget_default_group",)

_MODULES = (
    "torch.distributed.nn.functional",
    "torch.distributed.optim.zero_redundancy_optimizer",
    "torch.distributed.fsdp.sharded_grad_scaler",
)
"""The modules of torch with such functions."""


def forget_default_group() -> None:
    """Let functions of torch use whatever is the default group when they are called. Local."""
    group = dist.group.WORLD
    for function in _functions():
        values = function.__defaults__ or ()
        if any(value is group for value in values):
            function.__defaults__ = tuple(None if value is group else value for value in values)


def _functions() -> Iterator[FunctionType]:
    for module in [sys.modules[name] for name in _MODULES if name in sys.modules]:
        for thing in list(vars(module).values()):
            members = vars(thing).values() if inspect.isclass(thing) else [thing]
            yield from (member for member in members if inspect.isfunction(member))
