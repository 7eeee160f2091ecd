"""What takes a model that torch has sharded, and what refuses it, with the reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dualdist as hvd

from ..helpers.sharded_training import shard, transformer, whole
from ..helpers.world import everywhere

pytestmark = pytest.mark.ranks(2, 3)


def sharded_linear() -> tuple[Any, torch.optim.Optimizer]:
    """Return a layer with one row of weights per rank, and its optimizer after one step."""
    from torch.distributed.fsdp import fully_shard

    layer = nn.Linear(1, hvd.size(), bias=False)
    nn.init.ones_(layer.weight)
    fully_shard(layer, mesh=hvd.device_mesh())
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0, momentum=0.5)
    layer(torch.ones(1, 1)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return layer, optimizer


@everywhere
def test_wrappers_and_broadcasts_refuse_a_sharded_model() -> None:
    layer, optimizer = sharded_linear()
    with pytest.raises(TypeError, match="fully_shard or parallelize_module has changed exchange gradients"):
        hvd.DistributedOptimizer(optimizer)
    with pytest.raises(TypeError, match="fully_shard or parallelize_module has changed exchange gradients"):
        hvd.DistributedDataParallel(layer)
    with pytest.raises(TypeError, match=r"broadcast_parameters\(\) before fully_shard"):
        hvd.broadcast_parameters(layer.state_dict(), 0)
    with pytest.raises(TypeError, match="of whose state each rank has its own part"):
        hvd.broadcast_optimizer_state(optimizer, 0)
    with pytest.raises(TypeError, match="compared by what sharded them"):
        hvd.check_replicas(layer)
    hvd.barrier()


@everywhere
def test_parameters_are_broadcast_before_they_are_sharded() -> None:
    from torch.distributed.fsdp import fully_shard

    layer: Any = nn.Linear(2, 2, bias=False)
    nn.init.constant_(layer.weight, hvd.rank() + 1.0)
    hvd.broadcast_parameters(layer.state_dict(), hvd.size() - 1)
    fully_shard(layer, mesh=hvd.device_mesh())
    assert layer.weight.full_tensor().tolist() == [[float(hvd.size())] * 2] * 2


@everywhere
def test_gradients_are_clipped_by_their_norm_over_all_ranks() -> None:
    layer, _ = sharded_linear()
    layer(torch.ones(1, 1)).sum().backward()
    norm: Any = nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
    assert norm.full_tensor().item() == pytest.approx(hvd.size() ** 0.5)
    assert layer.weight.grad.full_tensor().norm().item() == pytest.approx(1.0)


@everywhere
def test_an_overflow_on_one_rank_skips_the_step_on_all() -> None:
    layer, optimizer = sharded_linear()
    optimizer.param_groups[0]["lr"] = 1.0
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for overflows in (True, False):
        loss = layer(torch.ones(1, 1)).sum()
        scaler.scale(loss * float("inf") if overflows and hvd.rank() == 0 else loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert scaler.get_scale() == 2.0
        # The momentum is 1 after the step of `sharded_linear`.
        assert layer.weight.full_tensor().tolist() == [[1.0 if overflows else -0.5]] * hvd.size()


@everywhere
def test_weights_of_a_sharded_model_are_exported_whole(tmp_path: Path) -> None:
    model = transformer()
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    shard(model, hvd.device_mesh())
    for name in ("model.pt", "model.safetensors"):
        path = f"{tmp_path}/{name}"
        hvd.checkpoint.export_weights(path, model)
        assert all(hasattr(param, "full_tensor") for param in model.parameters())
        if name == "model.pt":
            found = torch.load(path, weights_only=True)
        else:
            from safetensors.torch import load_file

            found = load_file(path)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], whole(value)) for name, value in expected.items())
