"""Trains in a world of one without some parts of the package: python taken_off.py PART ...

Each part is refused in a fork of its own, of a process that has imported what they need of torch. Prints a line of JSON
for each: its name, and the public names that it lacks.
"""

from __future__ import annotations

import json
import os
import sys
from importlib.abc import MetaPathFinder
from typing import Any

import torch
import torch._dynamo
import torch.distributed.checkpoint.state_dict
import torch.distributed.tensor
from torch import nn


class Refusing(MetaPathFinder):
    """Does as if `dualdist.PART` were not there."""

    def __init__(self, part: str) -> None:
        self._name = f"dualdist.{part}"

    def find_spec(self, fullname: str, path: object, target: object = None) -> None:
        if f"{fullname}.".startswith(f"{self._name}."):
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)


def train(hvd: Any) -> None:
    """Take two steps in each style."""
    from dualdist.core.training.parallel import SynchronizedModule

    model = nn.Linear(2, 1)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    other = nn.Linear(2, 1)
    wrapped = SynchronizedModule(other)
    for _ in range(2):
        for module in (model, wrapped):
            before = module.state_dict() | {}
            module(torch.ones(3, 2)).sum().backward()
            assert before.keys() == module.state_dict().keys()
        optimizer.step()
        optimizer.zero_grad()
    assert other.bias.grad is not None and other.bias.grad.item() == 6.0  # two backwards of three samples


def lacking(part: str) -> list[str]:
    """Train without `part`, and return the public names for which an ImportError names it."""
    sys.meta_path.insert(0, Refusing(part))
    import dualdist as hvd

    hvd.init()
    assert hvd.allreduce(torch.full((2,), 3.0), op=hvd.Sum).tolist() == [3.0, 3.0]
    assert hvd.broadcast_object({"a": 1}, root_rank=0) == {"a": 1}
    train(hvd)
    hvd.shutdown()
    names = []
    for name in hvd.__all__:
        try:
            getattr(hvd, name)
        except ImportError as error:
            assert f"dualdist.{part}" in str(error), (name, error)
            names.append(name)
    return names


def main() -> None:
    for part in sys.argv[1:]:
        child = os.fork()
        if not child:
            sys.stdout.write(json.dumps([part, lacking(part)]) + "\n")
            sys.stdout.flush()
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if status:
            sys.stdout.write(json.dumps([part, None]) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
