"""Five steps of training with each framework, in processes that `dualdist.spawn` starts. Each returns the weights."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

import dualdist as hvd

__all__ = (
    "alone",
    "averaged_weights",
    "with_accelerate",
    "with_averages",
    "with_compile",
    "with_fabric",
    "with_fully_shard",
    "with_ignite",
    "with_lightning",
    "with_shared_optimizer_state",
    "with_torchmetrics",
)

STEPS = 5
ROWS = 12
"""Rows of a whole batch."""


def network() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)).double()


def whole_batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        inputs = torch.randn(ROWS, 4, generator=generator, dtype=torch.float64)
        yield inputs, inputs.sin().sum(dim=1, keepdim=True)


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return this rank's shares of the batches."""
    rows = slice(ROWS * hvd.rank() // hvd.size(), ROWS * (hvd.rank() + 1) // hvd.size())
    return [(inputs[rows], targets[rows]) for inputs, targets in whole_batches()]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def weights(model: nn.Module) -> list[float]:
    return torch.cat([param.detach().flatten() for param in model.parameters()]).tolist()


def loss_of(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (output - targets).square().mean()


def train(model: Any, optimizer: Any, own: Any) -> None:
    for inputs, targets in own:
        optimizer.zero_grad()
        loss_of(model(inputs), targets).backward()
        optimizer.step()


def alone() -> list[float]:
    """Return the weights of one process with the whole batches."""
    model = network()
    train(model, sgd(model), whole_batches())
    return weights(model)


def averaged_weights() -> list[float]:
    """Return the mean of the weights after each step of one process."""
    model = network()
    averaged = torch.optim.swa_utils.AveragedModel(model)
    optimizer = sgd(model)
    for batch in whole_batches():
        train(model, optimizer, [batch])
        averaged.update_parameters(model)
    return weights(averaged)


def wrapped() -> tuple[Any, Any]:
    """Return a model in a world, wrapped and bare."""
    hvd.init()
    bare = network()
    if hvd.rank():  # the wrapper makes them equal
        nn.init.zeros_(bare[0].weight)
    return hvd.DistributedDataParallel(bare), bare


def with_accelerate() -> list[float]:
    from accelerate import Accelerator

    model, bare = wrapped()
    accelerator = Accelerator(cpu=True)
    prepared = accelerator.prepare_model(model, evaluation_mode=True)
    assert prepared is model and accelerator.unwrap_model(model) is bare
    optimizer = accelerator.prepare(sgd(model))
    for inputs, targets in batches():
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model(inputs), targets))
            accelerator.clip_grad_norm_(model.parameters(), 1e9)
            optimizer.step()
            optimizer.zero_grad()
    state = accelerator.get_state_dict(model)
    assert torch.equal(state["0.weight"], bare[0].weight)
    with accelerator.no_sync(model):
        assert not model.require_backward_grad_sync
        with accelerator.trigger_sync_in_backward(model):
            assert model.require_backward_grad_sync
    return weights(bare)


def with_fabric() -> list[float]:
    from lightning.fabric import Fabric
    from lightning.fabric.plugins.environments import LightningEnvironment

    model, bare = wrapped()
    fabric = Fabric(accelerator="cpu", devices=1, plugins=[LightningEnvironment()])
    prepared, optimizer = fabric.setup(model, sgd(model))
    assert prepared.module is model
    for inputs, targets in batches():
        optimizer.zero_grad()
        fabric.backward(loss_of(prepared(inputs), targets))
        optimizer.step()
    return weights(bare)


def with_lightning() -> list[float]:
    import lightning
    from lightning.fabric.plugins.environments import LightningEnvironment

    model, bare = wrapped()

    class Task(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            return loss_of(self.model(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return sgd(self.model)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # advice about workers, loggers and the precision of matrices
        trainer = lightning.Trainer(
            accelerator="cpu", devices=1, max_epochs=1, barebones=True, plugins=[LightningEnvironment()]
        )
        trainer.fit(Task(), torch.utils.data.DataLoader(batches(), batch_size=None))  # type: ignore[arg-type]
    return weights(bare)


def with_ignite() -> list[float]:
    from ignite.engine import Events, create_supervised_trainer
    from ignite.handlers import Checkpoint, EMAHandler

    model, bare = wrapped()
    saved: dict[str, Any] = {}

    def keep(checkpoint: Any, filename: str, metadata: Any = None) -> None:
        saved.update(checkpoint)

    def rank_0_alone(checkpoint: Any, filename: str, metadata: Any = None) -> None:
        keep(checkpoint, filename)

    trainer = create_supervised_trainer(model, sgd(model), nn.MSELoss())
    averages = EMAHandler(model, momentum=0.5)
    averages.attach(trainer)
    trainer.add_event_handler(Events.COMPLETED, Checkpoint({"model": model}, rank_0_alone))
    trainer.run(batches(), max_epochs=1)
    assert type(averages.ema_model) is type(bare)
    if hvd.rank() == 0:
        assert list(saved) == list(bare.state_dict())
    return weights(bare)


def with_torchmetrics() -> list[float]:
    from torchmetrics import MeanMetric

    model, bare = wrapped()
    metric = MeanMetric()
    optimizer = sgd(model)
    for inputs, targets in batches():
        optimizer.zero_grad()
        loss = loss_of(model(inputs), targets)
        metric.update(loss.detach())
        loss.backward()
        optimizer.step()
    return [*weights(bare), float(metric.compute())]


def with_averages() -> list[float]:
    model, _ = wrapped()
    averaged = torch.optim.swa_utils.AveragedModel(model)
    optimizer = sgd(model)
    for batch in batches():
        train(model, optimizer, [batch])
        averaged.update_parameters(model)
    return weights(averaged)


def with_compile() -> list[float]:
    model, bare = wrapped()
    train(torch.compile(model, backend="eager"), sgd(model), batches())
    return weights(bare)


def with_shared_optimizer_state() -> list[float]:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model, bare = wrapped()
    optimizer: Any = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    train(model, optimizer, batches())
    return weights(bare)


def with_fully_shard() -> list[float]:
    """Train beside another model, which torch's fully_shard has sharded, and return the weights of both."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, bare = wrapped()
    sharded = network()
    fully_shard(sharded, mesh=init_device_mesh("cpu", (hvd.size(),)))
    train(sharded, sgd(sharded), batches())
    train(model, sgd(model), batches())
    full = torch.cat([param.full_tensor().detach().flatten() for param in sharded.parameters()])
    return [*weights(bare), *full.tolist()]
