"""Features beside training on a device, each against what the CPU gives or against plain arithmetic.

    python -m tests.gpu.test_features adopted|left ...

is a rank of the tests that launch processes of their own.
"""

from __future__ import annotations

import functools
import gc
import hashlib
import json
import multiprocessing
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, TensorDataset

import dualdist as hvd
from dualdist.checkpoint import CheckpointManager
from dualdist.elastic import TorchState
from dualdist.elastic.state import ModelStateHandler, OptimizerStateHandler

from ..helpers.rejoining import rejoin
from ..helpers.script_launch import Ended, finish
from ..helpers.styles import distributed
from ..helpers.world import World
from .device import DEVICE, IS_GPU, KIND, TRANSPORT, VARIABLES, load, needs_device, sleep

pytestmark = needs_device

MB = 1 << 20
Record = Callable[[str, object], None]


def on_host(device: str, tensors: Iterable[torch.Tensor | None]) -> list[torch.Tensor]:
    """Return copies of `tensors` on the host. All must be on `device`."""
    found = [tensor for tensor in tensors if tensor is not None]
    assert {tensor.device for tensor in found} == {torch.device(device)}
    return [tensor.detach().cpu().clone() for tensor in found]


Bits = dict[str, tuple[str, torch.dtype, torch.Size, str]]


def bits(named: dict[str, torch.Tensor]) -> Bits:
    """Return device, dtype, shape and a digest of the numbers of each tensor."""
    return {
        name: (
            tensor.device.type,
            tensor.dtype,
            tensor.shape,
            hashlib.sha256(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().data).hexdigest(),
        )
        for name, tensor in named.items()
    }


def tensors_in(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Return the tensors of the state of `model` and `optimizer`, by name."""
    named = dict(model.state_dict())
    for number, entries in optimizer.state_dict()["state"].items():
        named |= {f"{number}.{name}": value for name, value in entries.items() if torch.is_tensor(value)}
    return named


def step(model: Any, optimizer: Any, inputs: torch.Tensor) -> None:
    optimizer.zero_grad()
    model(inputs).square().sum().backward()
    optimizer.step()


def allocated() -> int:
    """Return how much memory of the GPU is in use; 0 without a GPU."""
    return torch.cuda.memory_allocated() if IS_GPU else 0


def growth(device: str, call: Callable[[], object]) -> int:
    """Return by how many bytes `call()` has grown the memory of the GPU at its peak; 0 without a GPU."""
    if not device.startswith("cuda"):
        call()
        return 0
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


# Collectives give what they give with tensors on the CPU.


def sparse_steps(device: str) -> list[torch.Tensor]:
    torch.sparse.check_sparse_tensor_invariants.disable()  # torch 2.11 warns unless one is chosen for all tensors
    results = []
    for style in ("optimizer", "module"):
        model: Any = nn.Sequential(nn.Embedding(5, 2, sparse=True), nn.Linear(2, 1, bias=False))
        model.to(device, torch.float64)
        for param in model.parameters():
            nn.init.ones_(param)
        network, optimizer = distributed(style, model, torch.optim.SGD(model.parameters(), lr=0.25))
        for _ in range(2):
            step(network, optimizer, torch.tensor([0, hvd.rank() + 1, hvd.rank() + 1], device=device))
            assert model[0].weight.grad.is_sparse
        results += [*model.parameters(), model[0].weight.grad.to_dense()]
    reduced = hvd.sparse_allreduce_async(torch.eye(3, device=device).mul(hvd.rank() + 1).to_sparse(), "eye", hvd.Sum)
    return on_host(device, [*results, reduced().to_dense()])


def drawn(device: str, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(hvd.rank())
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(device)


def adasum(device: str) -> list[torch.Tensor]:
    weight = nn.Parameter(torch.zeros(3, dtype=torch.float64, device=device))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=0.5), op=hvd.Adasum)
    for _ in range(2):
        optimizer.zero_grad()
        (weight * drawn(device, 3)).sum().backward()
        optimizer.step()
    group = [drawn(device, 7), drawn(device, 300).float()]
    results = [hvd.allreduce(drawn(device, 5000), op=hvd.Adasum), *hvd.grouped_allreduce(group, op=hvd.Adasum)]
    return on_host(device, [weight, *results])


def joined(device: str) -> list[torch.Tensor]:
    """Train 3 steps on rank 0, and 1 step on the others, which then join."""
    weight = nn.Parameter(torch.zeros(3, dtype=torch.float64, device=device))
    bias = nn.Parameter(torch.zeros(1, dtype=torch.float32, device=device))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight, bias], lr=0.5))
    results: list[torch.Tensor] = []
    for _ in range(3 if hvd.rank() == 0 else 1):
        optimizer.zero_grad()
        ((weight * drawn(device, 3)).sum() + bias.sum() * 3).backward()
        optimizer.step()
        results += [weight.detach().clone(), bias.detach().clone()]
        results += [hvd.allreduce(torch.full((6,), hvd.rank() + 2, device=device), op=op) for op in (hvd.Sum, hvd.Min)]
    assert hvd.join() == 0
    return on_host(device, results)


def rows(device: str) -> list[torch.Tensor]:
    rank, size = hvd.rank(), hvd.size()
    results = []
    for dtype in (torch.float64, torch.bfloat16, torch.bool, torch.complex64):
        table = torch.arange(3 * size * 4, device=device).view(-1, 4).add(rank).to(dtype)
        splits = torch.tensor([1 + 2 * (rank == other) for other in range(size)], device=device).int()
        results += [hvd.allgather(table[: 3 * rank + 1]), hvd.allgather(table[: 5 * rank])]
        results += hvd.alltoall(table, splits)
        results += hvd.grouped_allgather([table[rank:, :3], table.t()[: 2 * rank]])
        results += [hvd.synchronize(hvd.allgather_async(table.t()[rank:]))]
        if dtype is not torch.bool:
            results += [hvd.reducescatter(table[:5], op=hvd.Sum), hvd.broadcast(table.t(), size - 1)]
    return on_host(device, results)


@pytest.mark.parametrize("function", [sparse_steps, adasum, joined, rows])
def test_results_are_those_of_the_cpu(either: World, function: Callable[[str], list[torch.Tensor]]) -> None:
    found, expected = either.run(function, DEVICE), either.run(function, "cpu")
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)


# State that one rank sends to the others.

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adam": functools.partial(torch.optim.Adam, lr=0.1),
    "fused": functools.partial(torch.optim.Adam, lr=0.1, fused=True),
    "capturable": functools.partial(torch.optim.Adam, lr=0.1, capturable=True),
    "momentum": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
}


class TwoDevices(nn.Module):
    """Two layers, each on a device of its own."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__()
        self.first = nn.Linear(4, 5).to(first, torch.float64)
        self.second = nn.Linear(5, 2).to(second, torch.float64)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.first(inputs.to(self.first.weight.device)).tanh()
        return self.second(hidden.to(self.second.weight.device))  # type: ignore[no-any-return]


def shared(first: str, second: str, kind: str) -> tuple[Bits, Bits, Bits]:
    """Return the state of rank 0 after two steps, of this rank when it is shared, and after one more step."""
    torch.manual_seed(hvd.rank())
    model = TwoDevices(first, second)
    optimizer = OPTIMIZERS[kind](model.parameters())
    if hvd.rank() == 0:
        for _ in range(2):
            step(model, optimizer, torch.ones(3, 4, dtype=torch.float64))
    else:
        optimizer.param_groups[0]["lr"] = 5.0
    roots = hvd.broadcast_object(bits(tensors_in(model, optimizer)))
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert optimizer.param_groups[0]["lr"] == 0.1
    received = bits(tensors_in(model, optimizer))
    step(model, optimizer, torch.ones(3, 4, dtype=torch.float64))
    return roots, received, bits(tensors_in(model, optimizer))


@pytest.mark.parametrize(
    ("first", "second", "kind"),
    [*((DEVICE, DEVICE, kind) for kind in OPTIMIZERS), (DEVICE, "cpu", "adam"), ("cpu", DEVICE, "adam")],
)
def test_parameters_and_optimizer_state_arrive_bit_by_bit_where_they_were(
    pair: World, first: str, second: str, kind: str
) -> None:
    (roots, own, last), (_, received, others_last) = pair.run(shared, first, second, kind)
    assert own == roots
    assert received == roots
    assert others_last == last


def objects(device: str) -> list[Bits]:
    """Return what has arrived of an object of rank 1, and of one of each rank."""
    own = {
        "matrix": drawn(device, 3, 4).t(),
        "half": drawn(device, 5).bfloat16(),
        "mask": drawn(device, 2) > 0,
        "empty": torch.ones(0, device=device),
    }
    received = hvd.broadcast_object(own, root_rank=1)
    return [bits(own), bits(received), *map(bits, hvd.allgather_object(own))]


def test_tensors_in_objects_arrive_on_the_gpu(pair: World) -> None:
    found = pair.run(objects, DEVICE)
    own = [each[0] for each in found]
    assert own[0] != own[1] and {entry[0] for entry in own[0].values()} == {KIND}
    for _, received, *gathered in found:
        assert received == own[1]
        assert gathered == own


def mixed_steps(first: str, second: str, style: str) -> list[torch.Tensor]:
    """Return gradients and parameters after each of 3 steps of a model on two devices."""
    torch.manual_seed(hvd.rank())
    model = TwoDevices(first, second)
    if style == "optimizer":
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    network, optimizer = distributed(style, model, torch.optim.Adam(model.parameters(), lr=0.1))
    results: list[torch.Tensor] = []
    for _ in range(3):
        step(network, optimizer, drawn("cpu", 6, 4))
        for layer, device in ((model.first, first), (model.second, second)):
            results += on_host(device, [*layer.parameters(), *(param.grad for param in layer.parameters())])
    hvd.check_replicas(network, optimizer)
    return results


@pytest.mark.parametrize("style", ["module", "optimizer"])
@pytest.mark.parametrize("devices", [(DEVICE, "cpu"), ("cpu", DEVICE)], ids=str)
def test_a_model_on_gpu_and_cpu_trains_as_on_the_cpu(pair: World, devices: tuple[str, str], style: str) -> None:
    found, expected = pair.run(mixed_steps, *devices, style), pair.run(mixed_steps, "cpu", "cpu", style)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


# Checkpoints and commits.


def network(device: str, width: int) -> tuple[Any, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(width, width), nn.Dropout(), nn.BatchNorm1d(width), nn.Linear(width, 2))
    model.to(device)
    return model, torch.optim.Adam(model.parameters(), lr=0.1)


def checkpointed(device: str, folder: Path, width: int) -> tuple[Bits, Bits, list[int]]:
    """Return the state at the moment of save(), the restored one, and the growth of memory in both."""
    folder = folder if hvd.rank() == 0 else Path("/dev/null/not-here")
    inputs = torch.ones(4, width, device=device)
    torch.manual_seed(1)
    model, optimizer = network(device, width)
    wrapped = hvd.DistributedDataParallel(model)
    step(wrapped, optimizer, inputs)

    def manager(model: Any, optimizer: Any) -> CheckpointManager:
        state = {"model": model, "optimizer": optimizer}
        return CheckpointManager(folder, state, asynchronous=True, signals=())

    with manager(wrapped, optimizer) as saving:
        sleep(200)
        step(wrapped, optimizer, inputs)  # the device has not begun with it when save() reads
        live = tensors_in(model, optimizer)
        saved = {name: tensor.clone() for name, tensor in live.items()}
        peaks = [growth(device, saving.save)]
        for tensor in live.values():
            tensor.detach().zero_()  # while the file is written
        saved["draw"] = torch.rand(9, device=device)
        for _ in range(3):
            step(wrapped, optimizer, inputs)
    model, optimizer = network(device, width)
    with manager(model, optimizer) as restoring:
        peaks.append(growth(device, restoring.restore_latest))
    restored = bits(tensors_in(model, optimizer) | {"draw": torch.rand(9, device=device)})
    step(model, optimizer, inputs)
    return bits(saved), restored, peaks


def test_a_checkpoint_holds_the_moment_of_save_and_costs_no_memory_of_the_gpu(
    either: World, tmp_path: Path, record_property: Record
) -> None:
    width = 2048
    largest = 4 * width * width
    for saved, restored, (save_peak, restore_peak) in either.run(checkpointed, DEVICE, tmp_path, width):
        assert restored == saved
        record_property("figure", f"save {save_peak / MB:.1f}, restore {restore_peak / MB:.1f} MB")
        assert save_peak <= largest + MB
        assert restore_peak <= 3 * largest + MB  # two of the three are Adam's state


def committed(device: str, width: int) -> tuple[list[Bits], list[int]]:
    """Return the state at a commit, and twice after a restore; and the growth of memory by a commit, then and after."""
    torch.manual_seed(1)
    model, optimizer = network(device, width)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    state = TorchState(model, optimizer, batch=0)
    inputs = torch.ones(4, width, device=device)
    step(model, optimizer, inputs)
    state.commit()
    sleep(200)
    step(model, optimizer, inputs)  # the device has not begun with it when commit() reads
    state.batch = 1
    copies = [
        handler(value)._saved for handler, value in ((ModelStateHandler, model), (OptimizerStateHandler, optimizer))
    ]
    assert {leaf.device.type for leaf in tree_leaves(copies) if torch.is_tensor(leaf)} == {"cpu"}
    left = -allocated()
    sizes = [growth(device, state.commit), left + allocated()]
    found = [bits(tensors_in(model, optimizer))]
    for _ in range(2):
        step(model, optimizer, inputs)
        state.batch += 1
        assert bits(tensors_in(model, optimizer)) != found[0]
        state.restore()
        assert state.batch == 1
        found.append(bits(tensors_in(model, optimizer)))
    step(model, optimizer, inputs)
    return found, sizes


def test_a_commit_keeps_a_state_of_the_gpu_and_takes_none_of_its_memory(either: World, record_property: Record) -> None:
    for (at_commit, *restored), (peak, left) in either.run(committed, DEVICE, 1024):
        assert restored == [at_commit] * 2
        record_property("figure", f"peak {peak / MB:.1f}, left {left / MB:.1f} MB")
        assert peak <= MB and left <= 0


# Equal replicas, and ranks that differ.


def compared(device: str) -> tuple[int, int, list[str]]:
    """Return how many tensors check_replicas compares, how often the host waits, and what errors say of a change."""
    torch.manual_seed(0)
    model, optimizer = network(device, 8)
    step(model, optimizer, torch.ones(4, 8, device=device))
    hvd.check_replicas(model, optimizer)
    mode = torch.cuda.set_sync_debug_mode if device.startswith("cuda") else lambda mode: None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        mode("warn")
        hvd.check_replicas(model, optimizer)
        mode("default")
    waits = sum("called a synchronizing CUDA operation" in str(warning.message) for warning in caught)
    errors = []
    for tensor in (model[3].weight, optimizer.state[model[0].weight]["exp_avg_sq"]):
        with torch.no_grad():
            kept = tensor.clone()
            tensor[1, 3] += 1e-3 * hvd.rank()
        with pytest.raises(hvd.ReplicaMismatchError) as error:
            hvd.check_replicas(model, optimizer)
        errors.append(str(error.value))
        with torch.no_grad():
            tensor.copy_(kept)
    hvd.check_replicas(model, optimizer)
    return len(tensors_in(model, optimizer)), waits, errors


def test_replicas_are_compared_and_the_tensor_that_differs_is_named(pair: World, record_property: Record) -> None:
    for number, waits, errors in pair.run(compared, DEVICE):
        record_property("figure", f"{waits} waits, {number} tensors")
        assert waits <= number
        assert errors[0].startswith("'3.weight' (float32, 2x8)")
        assert errors[1].startswith("'optimizer.state[0].exp_avg_sq' (float32, 8x8)")


def mismatched(device: str) -> list[float]:
    own = torch.ones(2 + hvd.rank(), device=device)
    for call in (
        lambda: hvd.allreduce(own),
        lambda: hvd.synchronize(hvd.allreduce_async(own)),
        lambda: hvd.allgather(own.to([torch.float32, torch.float64][hvd.rank()])),
        lambda: hvd.allreduce(torch.ones(2, device=[device, "cpu"][hvd.rank()])),
    ):
        with pytest.raises(hvd.CollectiveMismatchError):
            call()
    layer: Any = nn.Linear(2, 1, bias=False, device=device)
    model = hvd.DistributedDataParallel(layer)
    (model(torch.ones(1, 2, device=device)) * (hvd.rank() + 1)).sum().backward()
    numbers: list[float] = [*layer.weight.grad.flatten().tolist(), *hvd.allreduce(own[:1], op=hvd.Sum).tolist()]
    return numbers


def test_a_mismatch_raises_on_both_ranks_and_the_next_calls_work(pair: World) -> None:
    assert pair.run(mismatched, DEVICE) == [[1.5, 1.5, 2.0]] * 2


# Worlds that begin and end.


def trained(device: str) -> list[float]:
    """Return two weights after 3 steps from 1, of which each subtracts 1 / 4."""
    layers = hvd.SyncBatchNorm(2, eps=1e-12, affine=False), nn.Linear(2, 1, bias=False)
    model: Any = nn.Sequential(*layers).to(device)
    nn.init.ones_(model[1].weight)
    wrapped = hvd.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    signs = torch.tensor([[1.0], [-1.0], [1.0], [-1.0]], device=device)
    for _ in range(3):
        optimizer.zero_grad()
        (wrapped(signs.expand(4, 2)) * signs).mean().backward()
        optimizer.step()
    weights: list[float] = model[1].weight.flatten().tolist()
    return weights


def rejoined(device: str) -> tuple[list[float], int]:
    """Return the weights of trainings in 6 worlds, and how much memory of the GPU the last 5 have kept."""

    def free() -> int:
        gc.collect()
        if not device.startswith("cuda"):
            return 0
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info()[0]

    weights, before = trained(device), 0
    for cycle in range(6):
        rejoin()
        weights += [*trained(device), *trained(device)]
        if cycle == 0:
            before = free()
    return weights, before - free()


def test_a_rank_trains_again_in_each_new_world_and_keeps_no_communicators(one: World, record_property: Record) -> None:
    ((weights, kept),) = one.run(rejoined, DEVICE)
    record_property("figure", f"{kept / MB:.0f} MB kept")
    assert weights == pytest.approx([0.25] * 26, abs=1e-5)
    assert kept < 100 * MB


def launched(size: int, *arguments: object) -> Ended:
    """Run this file under torchrun to its end, at most a minute."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size)]
    command = [*torchrun, "-m", __name__, *map(str, arguments)]
    return finish(command, VARIABLES, seconds=60, forks=not IS_GPU)


def adopted(device: str, config: str, bound: str) -> None:
    """Train in torch's own world, before and after a shutdown, and use torch's group afterwards."""
    device_id = {"device_id": torch.device(device)} if bound == "bound" else {}
    dist.init_process_group(config, **device_id)  # type: ignore[arg-type]
    group = dist.group.WORLD
    for _ in range(2):
        hvd.init()
        assert hvd.device() == torch.device(device), hvd.device()
        assert hvd.transport_name() == ("gloo" if device == "cpu" else TRANSPORT)
        assert trained(device) == pytest.approx([0.25, 0.25], abs=1e-5)
        assert hvd.allreduce(torch.ones(3), op=hvd.Sum).tolist() == [hvd.size()] * 3
        hvd.shutdown()
        assert dist.group.WORLD is group
        total = torch.ones(5, device=device)
        dist.all_reduce(total)
        assert total.tolist() == [dist.get_world_size()] * 5
    dist.destroy_process_group()
    print("destroyed", flush=True)


@pytest.mark.parametrize(
    ("config", "bound"), [(TRANSPORT, "bound"), (TRANSPORT, "unbound"), (f"cpu:gloo,{KIND}:{TRANSPORT}", "unbound")]
)
def test_a_world_of_torch_is_adopted_and_still_works_after_shutdown(config: str, bound: str) -> None:
    ended = launched(1, "adopted", DEVICE, config, bound)
    assert ended.code == 0, ended.output
    assert "destroyed\n" in ended.output


# Processes that are forked, and that die.


def loaded(device: str) -> list[float]:
    """Return the weight after each step of a training whose batches two forked workers bring through pinned memory."""
    weight = nn.Parameter(torch.zeros((), device=device))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0))
    weight.sum().backward()  # uses the device before the fork
    data = TensorDataset(torch.arange(12.0).view(6, 2))
    loader = DataLoader(data, 2, num_workers=2, pin_memory=device != "cpu", multiprocessing_context="fork", timeout=30)
    weights = []
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
        for (batch,) in loader:
            assert batch.is_pinned() == (device != "cpu")
            optimizer.zero_grad()
            (weight * batch.to(device, non_blocking=True).mean()).backward()
            optimizer.step()
            weights.append(weight.item())
    assert multiprocessing.active_children() == []
    assert trained(device) == pytest.approx([0.25, 0.25], abs=1e-5)
    return weights


def test_forked_workers_bring_pinned_batches_and_end(either: World) -> None:
    assert either.run(loaded, DEVICE) == [[-1.5, -7.0, -16.5]] * either.size


def left(how: str, device: str, pipe: str) -> None:
    """Leave on rank 1 in the middle of a step. Report on rank 0, which waits in item(), what its backward raises.

    "killed at the end": rank 0 leaves, too.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # of torchrun
    hvd.init()
    layers = nn.Sequential(hvd.SyncBatchNorm(64), nn.Linear(64, 64)).to(device)
    model: Any = hvd.DistributedDataParallel(layers, broadcast_buffers=False)
    for _ in range(2):
        model(torch.ones(8, 64, device=device)).sum().backward()
    group: Any = dist.new_group([0, 1])
    hvd.barrier()  # rank 0 has the results of the steps
    if hvd.rank() == 1:
        Path(pipe).read_bytes()  # until rank 0 is at its item()
        if how in ("killed", "killed at the end"):
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "failed":
            raise ValueError("of the script")
        return  # as a rank with fewer batches
    loss = model(torch.ones(8, 64, device=device)).sum()  # the layer runs ahead, and waits for rank 1
    if how == "killed":  # so does a group of the script
        dist.all_reduce(loss.detach(), group=group)
    Path(pipe).write_bytes(b"")
    begun = time.monotonic()
    if how == "killed at the end":
        hvd.shutdown()
    loss.item()
    if not hvd.is_initialized():
        print("\nleft", flush=True)
        return
    waited = time.monotonic() - begun
    try:
        loss.backward()
        raise AssertionError("backward has not raised")
    except hvd.HorovodInternalError as error:
        seconds = time.monotonic() - begun - waited
        print("\n" + json.dumps([type(error).__name__, str(error), waited, seconds]), flush=True)


@pytest.mark.only_ci(where=lambda how: how != "failed")
@pytest.mark.parametrize("how", ["killed", "failed", "ended"])
def test_a_rank_names_the_one_that_left_while_it_waited_in_item(
    how: str, record_property: Record, tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "pipe")
    ended = launched(2, "left", how, DEVICE, tmp_path / "pipe")
    reports = [line for line in ended.output.splitlines() if line.startswith('["')]
    assert len(reports) == 1, ended.output
    kind, text, waited, seconds = json.loads(reports[0])
    record_property("figure", f"{seconds:.1f} s")
    assert kind == "HorovodInternalError" and "rank 1" in text
    assert waited < 20 and seconds < 20


@pytest.mark.only_ci
def test_a_rank_that_leaves_does_not_wait_for_one_that_was_killed(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    ended = launched(2, "left", "killed at the end", DEVICE, tmp_path / "pipe")
    assert "\nleft\n" in ended.output and "the cause is rank 1." in ended.output


# SyncBatchNorm.


def autocast_steps(device: str) -> list[torch.Tensor]:
    torch.manual_seed(0)
    layers = (nn.Conv2d(3, 4, 3, bias=False), hvd.SyncBatchNorm(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 2))
    model: Any = nn.Sequential(*layers).to(device)
    wrapped = hvd.DistributedDataParallel(model)
    dtypes: list[torch.dtype] = []
    model[1].register_forward_hook(lambda layer, inputs, output: dtypes.extend([inputs[0].dtype, output.dtype]))
    inputs = (drawn(device, 6 + hvd.rank(), 3, 8, 8) * 2 + 1).float()
    with torch.autocast(torch.device(device).type, torch.bfloat16):
        wrapped(inputs).float().square().mean().backward()
    assert dtypes == [torch.bfloat16] * 2
    grads = [param.grad for param in model.parameters()]
    return on_host(device, [*grads, model[1].running_mean, model[1].running_var])


def test_sync_batch_norm_under_autocast_gives_the_numbers_of_the_cpu(pair: World) -> None:
    found, expected = pair.run(autocast_steps, DEVICE), pair.run(autocast_steps, "cpu")
    assert all(torch.equal(*tensors) for tensors in zip(*found, strict=True))
    for own, reference in zip(found[0], expected[0], strict=True):
        torch.testing.assert_close(own, reference, rtol=5e-2, atol=5e-2 * float(reference.abs().max()))


def subset_steps(device: str) -> list[torch.Tensor]:
    """Return what a layer of rank 0 alone gives, and a layer of both ranks."""
    subset = hvd.add_process_set([0])
    results: list[torch.Tensor | None] = []
    for process_set in (subset, hvd.global_process_set, subset):
        if process_set.included():
            layer = hvd.SyncBatchNorm(3, process_set=process_set).to(device, torch.float64)
            inputs = drawn(device, 5, 3, 4).requires_grad_()
            output = layer(inputs * 2 + 1)
            (output * output.detach().cos()).sum().backward()
            grads = [param.grad for param in layer.parameters()]
            results += [output, inputs.grad, layer.running_mean, layer.running_var, *grads]
    hvd.remove_process_set(subset)
    return on_host(device, results)


def test_sync_batch_norm_of_one_of_two_ranks_gives_the_numbers_of_the_cpu(pair: World) -> None:
    found, expected = pair.run(subset_steps, DEVICE), pair.run(subset_steps, "cpu")
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    layer = nn.BatchNorm1d(3).double()
    alone = torch.randn(5, 3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    torch.testing.assert_close(found[0][0], layer(alone * 2 + 1).detach(), rtol=1e-6, atol=1e-6)


if __name__ == "__main__":
    load()
    {"adopted": adopted, "left": left}[sys.argv[1]](*sys.argv[2:])
