"""Sharded checkpoints between this package and others.

Each function runs on every rank, and returns weights after one more step: of the model that saved, of one that loaded
the other package's checkpoint, and of one into which the other package loaded ours.
"""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import torch

import dualdist as hvd
from dualdist.checkpoint import CheckpointManager

from .sharded_training import adamw, shard, train, transformer, weights

RATE = 0.02
"""Learning rate of what is saved, which is not that of `adamw`."""


def sharded(model: Any, mesh: Any = None) -> Any:
    shard(model, mesh or hvd.device_mesh())
    return model


def begun() -> tuple[Any, Any]:
    """Return a model and an optimizer in two groups, after a step."""
    model = sharded(transformer())
    first, *others = model.parameters()
    optimizer = adamw([{"params": [first], "weight_decay": 0.5}, {"params": others}])
    for group in optimizer.param_groups:
        group["lr"] = RATE
    train(model, optimizer, steps=1)
    return model, optimizer


def fresh() -> tuple[Any, Any]:
    """Return a model with other weights than `begun`, and an optimizer in its groups."""
    model = sharded(transformer())
    with torch.no_grad():
        for param in model.parameters():
            param.add_(1)
    first, *others = model.parameters()
    return model, adamw([{"params": [first]}, {"params": others}])


def manager(folder: Path, model: Any, optimizer: Any) -> CheckpointManager:
    return CheckpointManager(folder, {"model": model, "optimizer": optimizer}, sharded=True, signals=())


def saved(folder: Path, model: Any, optimizer: Any) -> Path:
    with manager(folder, model, optimizer) as ours:
        ours.steps = 1
        ours.save()
    return folder / "step-000000001"


def continued(*pairs: tuple[Any, Any]) -> list[list[float]]:
    for pair in pairs:
        train(*pair, steps=2, first=1)
    return [weights(model) for model, _ in pairs]


def of_accelerate(path: str) -> list[list[float]]:
    """Accelerate has the model and the optimizer in a folder each, and calls its functions below with FSDP2 on GPUs."""
    from accelerate import PartialState
    from accelerate.utils import fsdp_utils
    from torch.distributed.fsdp import StateDictType

    hvd.init()
    folder, kind = Path(path), StateDictType.SHARDED_STATE_DICT
    PartialState(cpu=True)
    plugin = types.SimpleNamespace(fsdp_version=2, state_dict_type=kind, state_dict_config=None)
    accelerator = types.SimpleNamespace(wait_for_everyone=hvd.barrier)
    mine, theirs, ours = begun(), fresh(), fresh()
    fsdp_utils.save_fsdp_model(plugin, accelerator, mine[0], folder / "theirs")
    fsdp_utils.save_fsdp_optimizer(plugin, accelerator, mine[1], mine[0], folder / "theirs")
    with manager(folder / "unused", *theirs) as loading:
        for name in ("pytorch_model_fsdp_0", "optimizer_0"):
            loading.restore(folder / "theirs" / name, strict=False)
    step = saved(folder / "ours", *mine)
    if hvd.rank() == 0:
        for name in ("pytorch_model_fsdp_0", "optimizer_0"):
            (folder / name).symlink_to(step)
    hvd.barrier()
    fsdp_utils.load_fsdp_model(plugin, accelerator, ours[0], folder)
    fsdp_utils.load_fsdp_optimizer(plugin, accelerator, ours[1], ours[0], folder)
    return continued(mine, theirs, ours)


def of_fabric(path: str) -> list[list[float]]:
    from lightning.fabric import Fabric
    from lightning.fabric.plugins.environments import TorchElasticEnvironment
    from lightning.fabric.strategies import ModelParallelStrategy

    hvd.init()
    folder = Path(path)
    strategy = ModelParallelStrategy(parallelize_fn=lambda model, _: sharded(model))
    fabric = Fabric(accelerator="cpu", devices=hvd.size(), strategy=strategy, plugins=[TorchElasticEnvironment()])
    fabric.launch()
    mine, theirs, ours = begun(), fresh(), fresh()
    fabric.save(folder / "theirs", {"model": mine[0], "optimizer": mine[1], "epoch": 1})
    with manager(folder / "unused", *theirs) as loading:
        loading.restore(folder / "theirs")
    step = saved(folder / "ours", *mine)
    if hvd.rank() == 0:
        torch.save({}, step / "meta.pt")  # Fabric's own file for all else
    hvd.barrier()
    fabric.load(step, {"model": ours[0], "optimizer": ours[1]})
    return continued(mine, theirs, ours)
