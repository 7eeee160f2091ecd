"""Five steps of training with each framework, in processes that `dualdist.spawn` starts. Each returns weights."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

import dualdist as hvd

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


def wrapped() -> tuple[Any, Any]:
    """Return a model in a world, wrapped and bare."""
    hvd.init()
    bare = network()
    if hvd.rank():  # the wrapper makes them equal
        nn.init.zeros_(bare[0].weight)
    return hvd.DistributedDataParallel(bare), bare


def ways() -> Iterator[tuple[str, Any, Any, Any]]:
    """Yield each way to distribute a model: its name, the model, the bare one, and the optimizer."""
    hvd.init()
    for way in ("framework", "wrapper", "optimizer"):
        bare = network()
        if hvd.rank():  # what distributes the model makes them equal
            nn.init.zeros_(bare[0].weight)
        model = hvd.DistributedDataParallel(bare) if way == "wrapper" else bare
        optimizer = sgd(model)
        if way == "optimizer":
            hvd.broadcast_parameters(bare.state_dict(), root_rank=0)
            optimizer = hvd.DistributedOptimizer(optimizer)
        yield way, model, bare, optimizer


def with_accelerate() -> dict[str, list[float]]:
    from accelerate import Accelerator

    found = {}
    for way, model, bare, optimizer in ways():
        accelerator = Accelerator(cpu=True)
        prepared = accelerator.prepare_model(model, evaluation_mode=way != "framework")
        assert (prepared is model) is (way != "framework") and accelerator.unwrap_model(prepared) is bare
        optimizer = accelerator.prepare(optimizer)
        for inputs, targets in batches():
            with accelerator.accumulate(prepared):
                accelerator.backward(loss_of(prepared(inputs), targets))
                accelerator.clip_grad_norm_(prepared.parameters(), 1e9)
                optimizer.step()
                optimizer.zero_grad()
        state = accelerator.get_state_dict(prepared)
        assert torch.equal(state["0.weight"], bare[0].weight)
        if way == "wrapper":
            with accelerator.no_sync(model):
                assert not model.require_backward_grad_sync
                with accelerator.trigger_sync_in_backward(model):
                    assert model.require_backward_grad_sync
        found[way] = weights(bare)
    return found


def of_lightning(way: str) -> dict[str, Any]:
    """Return the arguments of Fabric and of Trainer for their own way, or for a model that is distributed already."""
    from lightning.fabric.plugins.environments import LightningEnvironment, TorchElasticEnvironment

    if way == "framework":
        places = {"devices": hvd.local_size(), "num_nodes": hvd.cross_size()}
        return {"accelerator": "cpu", "strategy": "ddp", "plugins": [TorchElasticEnvironment()], **places}
    return {"accelerator": "cpu", "devices": 1, "plugins": [LightningEnvironment()]}


def with_fabric() -> dict[str, list[float]]:
    from lightning.fabric import Fabric

    found = {}
    for way, model, bare, optimizer in ways():
        fabric = Fabric(**of_lightning(way))
        fabric.launch()
        prepared, optimizer = fabric.setup(model, optimizer)
        assert prepared.module is model
        for inputs, targets in batches():
            optimizer.zero_grad()
            fabric.backward(loss_of(prepared(inputs), targets))
            optimizer.step()
        found[way] = weights(bare)
    return found


def with_lightning() -> dict[str, list[float]]:
    import lightning

    class Task(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self, model: Any, optimizer: Any) -> None:
            super().__init__()
            self.model, self.optimizer = model, optimizer

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            return loss_of(self.model(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return self.optimizer

    found = {}
    for way, model, bare, optimizer in ways():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # advice about workers, loggers and the precision of matrices
            trainer = lightning.Trainer(
                max_epochs=1, barebones=True, use_distributed_sampler=False, **of_lightning(way)
            )
            own: Any = torch.utils.data.DataLoader(batches(), batch_size=None)  # type: ignore[arg-type]
            trainer.fit(Task(model, optimizer), own)
        found[way] = weights(bare)
    return found


def with_ignite() -> dict[str, list[float]]:
    import ignite.distributed as idist
    from ignite.engine import Events, create_supervised_trainer
    from ignite.handlers import Checkpoint, EMAHandler

    found = {}
    saved: dict[str, Any] = {}

    def keep(checkpoint: Any, filename: str, metadata: Any = None) -> None:
        saved.update(checkpoint)

    def rank_0_alone(checkpoint: Any, filename: str, metadata: Any = None) -> None:
        keep(checkpoint, filename)

    for way, model, bare, optimizer in ways():
        if way == "framework":
            model, optimizer = idist.auto_model(model), idist.auto_optim(optimizer)
        trainer = create_supervised_trainer(model, optimizer, nn.MSELoss())
        averages = EMAHandler(model, momentum=0.5)
        averages.attach(trainer)
        trainer.add_event_handler(Events.COMPLETED, Checkpoint({"model": model}, rank_0_alone))
        trainer.run(batches(), max_epochs=1)
        if way == "wrapper":
            assert type(averages.ema_model) is type(bare)
        if hvd.rank() == 0:
            assert list(saved) == list(bare.state_dict())
        saved.clear()
        found[way] = weights(bare)
    return found


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
