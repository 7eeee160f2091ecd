"""A small transformer, trained by one process, and by several of which each holds a part of it."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

import dualdist as hvd

STEPS = 10
VOCABULARY, WIDTH, HEADS, LENGTH = 11, 8, 4, 5
ROWS, MICRO_BATCHES = 16, 2
"""Rows of a whole batch, in two parts, whose gradients are added."""
NORM = 0.3
"""Below the norm of most gradients."""
RATE, EPSILON = 0.02, 1e-3
"""Of AdamW. With a small epsilon, rounding would decide the direction where a gradient is almost 0."""


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def heads(layer: nn.Module) -> torch.Tensor:  # with tensor parallelism, some of them
            return layer(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)  # type: ignore[no-any-return]

        query, key, value = map(heads, (self.query, self.key, self.value))
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.attention = Attention()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norms[0](x))
        return x + self.down(self.up(self.norms[1](x)).tanh())  # type: ignore[no-any-return]


def transformer() -> Any:
    torch.manual_seed(0)
    blocks = [Block() for _ in range(2)]
    return nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), *blocks, nn.Linear(WIDTH, VOCABULARY)).double()


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=RATE, eps=EPSILON)


def batches(steps: int) -> Iterator[torch.Tensor]:
    """Yield the rows of each whole batch: words, of which each but the first is to be predicted."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        yield torch.randint(VOCABULARY, (ROWS, LENGTH + 1), generator=generator)


def train(
    model: Any,
    optimizer: Any,
    place: tuple[int, int] = (0, 1),
    steps: int = STEPS,
    synchronizes: Callable[[bool], object] = lambda last: None,
    clip: Callable[[], object] | None = None,
    first: int = 0,
) -> None:
    """Train on the share of rank place[0] of place[1]. synchronizes: called before each backward; True: the last."""
    rank, size = place
    for number, rows in enumerate(batches(steps)):
        if number < first:
            continue
        optimizer.zero_grad()
        for micro, part in enumerate(rows.chunk(MICRO_BATCHES)):
            own = part[rank::size]
            synchronizes(micro == MICRO_BATCHES - 1)
            loss = nn.functional.cross_entropy(model(own[:, :-1]).flatten(0, 1), own[:, 1:].flatten())
            (loss / MICRO_BATCHES).backward()
        if clip is None:
            nn.utils.clip_grad_norm_(model.parameters(), NORM)
        else:
            clip()
        optimizer.step()


def whole(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor  # type: ignore[no-any-return]


def weights(model: nn.Module) -> list[float]:
    return torch.cat([whole(param.detach()).flatten() for param in model.parameters()]).tolist()


def alone(steps: int = STEPS) -> list[float]:
    """Return the weights of one process with the whole batches."""
    model = transformer()
    train(model, adamw(model.parameters()), steps=steps)
    return weights(model)


def shard(model: Any, mesh: Any) -> None:
    """Shard each block, and the rest, over `mesh`."""
    from torch.distributed.fsdp import fully_shard

    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def split(model: Any, mesh: Any) -> None:
    """Distribute the heads and the hidden units over `mesh`, and replicate all others: clipping needs one kind."""
    from torch.distributed.tensor import DTensor, Replicate, distribute_module
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plan: dict[str, Any] = {f"attention.{name}": ColwiseParallel() for name in ("query", "key", "value")}
    plan |= {"attention.out": RowwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
    others = [model[0], model[-1]]
    for layer in model:
        if isinstance(layer, Block):
            parallelize_module(layer, mesh, plan)
            others += layer.norms
    takes: Any = lambda module, inputs, mesh: DTensor.from_local(inputs[0], mesh, [Replicate()])  # noqa: E731
    gives: Any = lambda module, output, mesh: output.to_local()  # noqa: E731
    for layer in others:
        distribute_module(layer, mesh, input_fn=takes, output_fn=gives)


def trained(model: Any, place: tuple[int, int], **options: Any) -> list[float]:
    """Train a model that each rank holds a part of, and return its weights."""
    train(model, adamw(model.parameters()), place, **options)
    return weights(model)


def sharded_on(mesh: Any) -> list[float]:
    model = transformer()
    shard(model, mesh)
    return trained(model, (hvd.rank(), hvd.size()), synchronizes=model.set_requires_gradient_sync)


def fully_sharded() -> list[float]:
    return sharded_on(hvd.device_mesh())


def hybrid_sharded() -> list[float]:
    return sharded_on(hvd.device_mesh((hvd.size() // 2, 2), ("replicate", "shard")))


def tensor_parallel() -> list[float]:
    """Each pair of ranks holds the model. Its gradients are averaged over the pairs."""
    mesh, model = hvd.device_mesh((hvd.size() // 2, 2), ("data", "model")), transformer()
    split(model, mesh["model"])

    def clip() -> None:
        for param in model.parameters():
            hvd.allreduce_(param.grad.to_local(), process_set=mesh["data"])
        nn.utils.clip_grad_norm_(model.parameters(), NORM)

    return trained(model, (mesh["data"].get_local_rank(), hvd.size() // 2), clip=clip)


def tensor_parallel_and_sharded() -> list[float]:
    mesh, model = hvd.device_mesh((hvd.size() // 2, 2), ("data", "model")), transformer()
    split(model, mesh["model"])
    shard(model, mesh["data"])
    place = mesh["data"].get_local_rank(), hvd.size() // 2
    return trained(model, place, synchronizes=model.set_requires_gradient_sync)


def replicated() -> list[float]:
    from torch.distributed._composable.replicate import replicate

    model: Any = replicate(transformer(), device_mesh=hvd.device_mesh())
    return trained(model, (hvd.rank(), hvd.size()), synchronizes=model.set_requires_gradient_sync)


def with_shared_optimizer_state() -> list[float]:
    """Each rank holds the optimizer's state of some parameters of a model that dualdist has wrapped."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    bare, mesh = transformer(), hvd.device_mesh()
    model = hvd.DistributedDataParallel(bare, device_mesh=mesh)
    options: dict[str, Any] = {"lr": RATE, "eps": EPSILON, "process_group": mesh.get_group()}
    optimizer: Any = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, **options)

    def synchronizes(last: bool) -> None:
        model.require_backward_grad_sync = last

    train(model, optimizer, (hvd.rank(), hvd.size()), synchronizes=synchronizes)
    return weights(bare)


def pipelined() -> list[float]:
    """Each rank holds one layer, and micro-batches pass through all of them."""
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    layer, group = transformer()[hvd.rank()], hvd.device_mesh().get_group()
    stage = PipelineStage(layer, hvd.rank(), hvd.size(), torch.device("cpu"), group=group)

    def loss_of(output: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(output.flatten(0, 1), words.flatten())

    schedule, optimizer = ScheduleGPipe(stage, MICRO_BATCHES, loss_of), adamw(layer.parameters())
    for rows in batches(STEPS):
        optimizer.zero_grad()
        words = [rows[:, :-1]] if stage.is_first else []
        schedule.step(*words, target=rows[:, 1:] if stage.is_last else None)
        norm = hvd.allreduce(nn.utils.get_total_norm([param.grad for param in layer.parameters()]) ** 2, op=hvd.Sum)
        nn.utils.clip_grads_with_norm_(layer.parameters(), NORM, norm.sqrt())
        optimizer.step()
    return [number for part in hvd.allgather_object(weights(layer)) for number in part]


def resumed(folder: str, steps: int, asynchronous: bool) -> list[float]:
    """Resume from `folder`, if it has a checkpoint, train up to `steps`, save, and return the weights."""
    hvd.init()
    is_hybrid, model = hvd.size() == 4, transformer()
    mesh = hvd.device_mesh((2, 2), ("replicate", "shard")) if is_hybrid else hvd.device_mesh()
    shard(model, mesh)
    state = {"model": model, "optimizer": adamw(model.parameters()), "steps": 0}
    options: dict[str, Any] = {"every_steps": steps, "signals": (), "asynchronous": asynchronous}
    with hvd.checkpoint.CheckpointManager(folder, state, sharded=True, **options) as manager:
        manager.restore_latest()
        assert manager.steps == state["steps"]
        # Three ranks cannot share a batch equally: each trains on all of it.
        place = (0, 1) if hvd.size() == 3 else (hvd.rank(), hvd.size())
        for number in range(manager.steps, steps):
            train(model, state["optimizer"], place, number + 1, model.set_requires_gradient_sync, first=number)
            state["steps"] = number + 1
            manager.step()
    return weights(model)


KINDS: dict[str, Callable[[], list[float]]] = {
    function.__name__: function
    for function in (
        fully_sharded,
        hybrid_sharded,
        tensor_parallel,
        tensor_parallel_and_sharded,
        replicated,
        with_shared_optimizer_state,
        pipelined,
    )
}


def with_shards(kind: str) -> list[float]:
    # FSDP over tensor parallelism reduces norms and gathers weights in two steps, of which torch warns.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=UserWarning, module="torch")
        return KINDS[kind]()
