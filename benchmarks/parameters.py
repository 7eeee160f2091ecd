"""Measures broadcast_parameters of ResNet-50, beside one broadcast of as many bytes: with dualdist, and with torch.

torchrun --nproc-per-node 2 benchmarks/parameters.py
mpirun -np 2 python benchmarks/parameters.py --backend horovod
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from models import MODELS
from turns import compare_in_turns
from world import command_line, join_world

import dualdist as hvd


def main() -> None:
    settings = join_world(command_line("Measure broadcast_parameters.", rounds=15))
    network, _ = MODELS["resnet50"].make()
    state = network.state_dict()
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in state.values())
    # Not zeros: unwritten zeros are one page of the kernel, which is faster to read.
    flat = torch.ones(num_bytes // 4)
    if hvd.rank() == 0:
        print(f"{len(state)} tensors, {num_bytes / 1e6:.0f} MB, {hvd.size()} processes")
    functions: dict[str, Callable[[], object]] = {"one broadcast": lambda: hvd.broadcast_(flat, 0)}
    if dist.is_initialized():
        functions["one of torch.distributed"] = lambda: dist.broadcast(flat, 0)
    functions["broadcast_parameters"] = lambda: hvd.broadcast_parameters(state, 0)
    compare_in_turns(functions, settings.rounds)
    hvd.shutdown()


if __name__ == "__main__":
    main()
