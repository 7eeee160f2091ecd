"""Steps on a device beside plain torch and its DistributedDataParallel: waits, streams, kernels, memory, numbers.

Each worker function gets the device, and "plain", "ddp" (torch's), "module" or "optimizer" as `how`. The worlds are
those of conftest.py.
"""

from __future__ import annotations

import contextlib
import gc
import json
import math
import sysconfig
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.profiler import ProfilerActivity, profile

import dualdist as hvd
from dualdist.core import accelerator
from dualdist.devices import streams

from ..helpers import world as world_module
from ..helpers.requirements import need, need_programs
from ..helpers.world import World
from .device import DEVICE, needs_device, on_gpus, sleep

pytestmark = [*needs_device, pytest.mark.only_ci]

HOWS = ("plain", "ddp", "module", "optimizer")
STYLES = ("module", "optimizer")
Record = Callable[[str, object], None]
Tensors = list[torch.Tensor]

WIDTH, LAYERS = 64, 8
BUSY = 10
"""Milliseconds."""


def current_stream() -> Any:
    return streams.current_stream(torch.device(DEVICE))


def on_stream(stream: Any) -> contextlib.AbstractContextManager[Any]:
    """Make `stream` the current one in the `with` block; None changes nothing."""
    return contextlib.nullcontext() if stream is None else streams.use_stream(stream)


class Late(nn.Module):
    """Keeps its stream busy in backward, so that the layers before it get their gradients late."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        inputs.register_hook(lambda grad: sleep(BUSY))
        return inputs


class Branches(nn.Module):
    """Runs each of its parts on a stream of its own."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self.streams = [torch.Stream(torch.device(DEVICE)) for _ in parts]

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        current, outputs = current_stream(), torch.zeros_like(inputs)
        for stream, part in zip(self.streams, self.parts, strict=True):
            stream.wait_stream(current)
            with streams.use_stream(stream):
                output = part(inputs)
            current.wait_stream(stream)
            outputs = outputs + output
        return outputs


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


def mlp() -> nn.Module:
    return nn.Sequential(*(linear() for _ in range(LAYERS)))


def momentum(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.01, momentum=0.9)


def power_sgd() -> Any:
    return powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=2, start_powerSGD_iter=2, min_compression_rate=0.5
    )


HOOKS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "fp16": lambda: (None, default_hooks.fp16_compress_hook),
    "bf16": lambda: (None, default_hooks.bf16_compress_hook),
    "PowerSGD": lambda: (power_sgd(), powerSGD_hook.powerSGD_hook),
}


@dataclass(frozen=True)
class Case:
    """What a step does. The defaults are a plain one."""

    network: Callable[[], nn.Module] = mlp
    optimizer: Callable[[Any], torch.optim.Optimizer] = momentum
    dtype: torch.dtype = torch.float32
    width: int = WIDTH
    autocast: torch.dtype | None = None
    scaled: bool = False
    passes: int = 1
    max_norm: float | None = None
    keeps: bool = False
    """Whether zero_grad keeps the gradients' memory."""
    hook: str = ""
    cap_mb: float | None = None
    groups: tuple[int, ...] = ()
    """How many parameters have a bucket together: what `cap_mb` makes of them, in the order of the parameters."""


class Training:
    """One model and its optimizer in one of HOWS."""

    def __init__(self, device: str, how: str, case: Case) -> None:
        gc.collect()  # beside an older wrapper, a new one sends no gradient before the end of backward
        torch.manual_seed(0)
        self.case, self.how = case, how
        self.network = case.network().to(device, case.dtype)
        self.inputs = torch.randn(16, case.width).to(device, case.dtype)
        self.optimizer = case.optimizer(self.network.parameters())
        self.scaler = torch.amp.GradScaler(self.inputs.device.type, enabled=case.scaled)
        hook = HOOKS[case.hook]() if case.hook else None
        self.model: Any = self.network
        if how == "ddp":
            self.model = nn.parallel.DistributedDataParallel(
                self.network, bucket_cap_mb=case.cap_mb, gradient_as_bucket_view=True
            )
        elif how == "module":
            self.model = hvd.DistributedDataParallel(self.network, bucket_cap_mb=case.cap_mb)
        elif how == "optimizer":
            params = iter(self.network.parameters())
            groups = [[next(params) for _ in range(count)] for count in case.groups] or None
            named = self.network.named_parameters()
            self.optimizer = hvd.DistributedOptimizer(
                self.optimizer, named, backward_passes_per_step=case.passes, groups=groups, comm_hook=hook
            )
        if hook is not None and how in ("ddp", "module"):
            self.model.register_comm_hook(*hook)

    def backward(self) -> torch.Tensor:
        """Run the backward passes of one step, and return the last loss."""
        case = self.case
        for left in reversed(range(case.passes)):
            is_local = left and self.how in ("ddp", "module")
            with (
                self.model.no_sync() if is_local else contextlib.nullcontext(),
                torch.autocast(self.inputs.device.type, case.autocast, enabled=case.autocast is not None),
            ):
                loss = self.loss()
                self.scaler.scale(loss).backward()
        return loss.detach()

    def loss(self) -> torch.Tensor:
        outputs: torch.Tensor = self.model(self.inputs)
        return (outputs.double() - 1).square().mean()

    def step(self) -> torch.Tensor:
        self.optimizer.zero_grad(set_to_none=not self.case.keeps)
        loss = self.backward()
        if self.case.max_norm is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.case.max_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss

    def grads(self) -> Tensors:
        return [param.grad.clone() for param in self.network.parameters() if param.grad is not None]


def on_host(tensors: Sequence[torch.Tensor]) -> Tensors:
    return [tensor.detach().cpu() for tensor in tensors]


# Waits of the host for the device

WAITS = {
    "bfloat16 autocast": Case(autocast=torch.bfloat16),
    "GradScaler": Case(autocast=torch.float16, scaled=True),
    "BatchNorm": Case(lambda: nn.Sequential(linear(), nn.BatchNorm1d(WIDTH), linear())),
    "SyncBatchNorm": Case(lambda: nn.Sequential(linear(), hvd.SyncBatchNorm(WIDTH), linear())),
    "accumulation": Case(passes=2),
    "clipping": Case(max_norm=0.1),
    "fused Adam": Case(optimizer=lambda params: torch.optim.Adam(params, fused=True)),
    "fp16 hook": Case(hook="fp16"),
    "bf16 hook": Case(hook="bf16"),
    "PowerSGD hook": Case(hook="PowerSGD"),
}


def waits(device: str, how: str, name: str) -> int:
    """Return how often the host waits for the device in a regular step."""
    training = Training(device, how, WAITS[name])
    for _ in range(4):
        training.step()
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        training.step()
        torch.cuda.set_sync_debug_mode("default")
    return sum("called a synchronizing CUDA operation" in str(warning.message) for warning in caught)


@on_gpus("way to count the waits of the host")
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("name", WAITS)
def test_the_host_waits_no_more_often_than_in_torch(one: World, name: str, style: str, record_property: Record) -> None:
    oracle = "ddp" if WAITS[name].hook else "plain"  # PowerSGD waits for the device itself
    (expected,), (found,) = one.run(waits, DEVICE, oracle, name), one.run(waits, DEVICE, style, name)
    record_property("figure", f"{oracle} {expected}, {style} {found}")
    assert found <= (0 if name == "SyncBatchNorm" else expected)
    assert WAITS[name].hook or found == expected  # a GradScaler must read whether there was an overflow


# Collectives on streams

SIZE = 1 << 20
Call = Callable[[torch.Tensor], Any]
CALLS: dict[str, tuple[Call, Call]] = {
    "allreduce": (lambda t: hvd.allreduce(t, op=hvd.Sum), lambda t: hvd.allreduce_async(t, op=hvd.Sum)),
    "allreduce_": (lambda t: hvd.allreduce_(t, op=hvd.Sum), lambda t: hvd.allreduce_async_(t, op=hvd.Sum)),
    "grouped_allreduce": (
        lambda t: hvd.grouped_allreduce([t, t.clone()], op=hvd.Sum),
        lambda t: hvd.grouped_allreduce_async([t, t.clone()], op=hvd.Sum),
    ),
    "allgather": (hvd.allgather, hvd.allgather_async),
    "broadcast": (lambda t: hvd.broadcast(t, 0), lambda t: hvd.broadcast_async(t, 0)),
    "reducescatter": (lambda t: hvd.reducescatter(t, op=hvd.Sum), lambda t: hvd.reducescatter_async(t, op=hvd.Sum)),
    "alltoall": (hvd.alltoall, lambda t: hvd.alltoall_async(t)),
}
"""name -> (synchronous call, asynchronous call)"""


def outputs_of(result: Any) -> Tensors:
    """Return the tensors of a result, without the counts of an alltoall."""
    tensors = list(result) if isinstance(result, tuple | list) else [result]
    return [tensor for tensor in tensors if tensor.dtype is not torch.int32]


def wrong_results(device: str, name: str, is_async: bool) -> list[int]:
    """Return the calls that give wrong numbers, when a busy stream makes them and their memory is used again at once.

    The memory of an input goes back to the side stream, that of an asynchronous result to the stream of the call.
    """
    call, start = CALLS[name]
    side, other = (torch.Stream(torch.device(device)) for _ in range(2))
    kept: list[Tensors] = []
    numbers = range(4)

    def numbered(number: int, device: str) -> torch.Tensor:
        return torch.arange(SIZE, dtype=torch.float32, device=device).add_(3 * number + hvd.rank())

    def spoiled() -> torch.Tensor:
        return torch.full((SIZE,), math.inf, device=device)

    for number in numbers:
        with streams.use_stream(side):
            sleep(BUSY)
            inputs = numbered(number, device)
            begun = start(inputs) if is_async else call(inputs)
            del inputs
            hvd.allreduce(torch.ones(1))  # then the asynchronous call has been started, too
            _ = [spoiled() for _ in range(3)]
            result = hvd.synchronize(begun) if is_async else begun
            del begun
            sleep(BUSY)
            kept.append([output.clone() for output in outputs_of(result)])
            del result
        with streams.use_stream(other):
            hvd.synchronize(start(spoiled()))
    accelerator.synchronize(torch.device(device))
    expected = [
        outputs_of(hvd.synchronize(start(inputs)) if is_async else call(inputs))
        for inputs in (numbered(number, "cpu") for number in numbers)
    ]
    return [
        number
        for number, outputs, others in zip(numbers, kept, expected, strict=True)
        if not all(map(torch.equal, on_host(outputs), others))
    ]


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("name", CALLS)
def test_calls_from_a_busy_stream_are_right_when_their_memory_is_used_again(
    either: World, name: str, is_async: bool
) -> None:
    assert either.run(wrong_results, DEVICE, name, is_async) == [[]] * either.size


def polled(device: str) -> tuple[bool, bool, bool]:
    """Return what poll says while the device is busy, whether it is still busy then, and what poll says afterwards."""
    side = torch.Stream(torch.device(device))
    with streams.use_stream(side):
        sleep(50 * BUSY)
        busy = streams.record_event(torch.device(device))
        handle = hvd.allreduce_async(torch.ones(SIZE, device=device))
    hvd.allreduce(torch.ones(1))  # then the asynchronous call has been started
    early = hvd.poll(handle)
    is_busy = not busy.query()
    accelerator.synchronize(torch.device(device))
    late = hvd.poll(handle)
    hvd.synchronize(handle)
    return early, is_busy, late


def test_poll_is_true_when_the_device_has_finished_and_does_not_wait_for_it(one: World) -> None:
    assert one.run(polled, DEVICE) == [(False, True, True)]


# Steps on streams


def mixed(network: Callable[[], nn.Module]) -> Case:
    """Return the case of a network whose last three layers share a bucket. That of the first layer follows."""
    return Case(network, dtype=torch.float64, cap_mb=0.09, groups=(2, 6))


def late() -> nn.Module:
    return nn.Sequential(linear(), Late(), linear(), Late(), linear(), linear())


def branches() -> nn.Module:
    return Branches(nn.Sequential(linear(), linear()), nn.Sequential(linear(), Late(), linear()))


PLACES = {"backward elsewhere": mixed(late), "all aside": mixed(late), "branches": mixed(branches)}


def gradients_on_streams(device: str, how: str, place: str) -> Tensors:
    """Return the gradients of several steps, and the weights after them."""
    training = Training(device, how, PLACES[place])
    first, second = (torch.Stream(torch.device(device)) for _ in range(2))
    found: Tensors = []
    accelerator.synchronize(torch.device(device))
    with warnings.catch_warnings(), on_stream(None if place == "branches" else first):
        # of torch since 2.10: the gradient of a parameter is added on another stream than it was computed on
        warnings.filterwarnings("ignore", "The AccumulateGrad node's stream", UserWarning)
        for _ in range(4):
            training.optimizer.zero_grad()
            sleep(BUSY)
            loss = training.loss()
            forward = current_stream()
            with on_stream(second if place == "backward elsewhere" else None):
                current_stream().wait_stream(forward)
                loss.backward()
                found += training.grads()
                training.optimizer.step()
                done = current_stream()
            forward.wait_stream(done)
    accelerator.synchronize(torch.device(device))
    return on_host([*found, *training.network.parameters()])


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("place", PLACES)
def test_gradients_are_those_of_torch_on_any_stream(one: World, place: str, style: str) -> None:
    (expected,) = one.run(gradients_on_streams, DEVICE, "plain", place)
    (found,) = one.run(gradients_on_streams, DEVICE, style, place)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


# Communication hooks


def hooked(device: str, how: str, name: str) -> list[Tensors]:
    """Return the gradients of each of several steps."""
    case = Case(lambda: nn.Sequential(linear(), nn.Tanh(), Late(), mlp()), hook=name)
    training = Training(device, how, case)
    steps = []
    for _ in range(6):
        training.step()
        steps.append(on_host(training.grads()))
    return steps


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("name", HOOKS)
def test_hooks_give_the_gradients_of_torch(one: World, name: str, style: str) -> None:
    (plain,) = one.run(hooked, DEVICE, "plain", name)
    (expected,) = one.run(hooked, DEVICE, "ddp", name)
    (found,) = one.run(hooked, DEVICE, style, name)
    assert not all(map(torch.equal, plain[-1], expected[-1]))
    # PowerSGD makes columns orthogonal, which amplifies differences in rounding.
    bound = {"rtol": 1e-3, "atol": 1e-5} if name == "PowerSGD" else {"rtol": 0, "atol": 0}
    torch.testing.assert_close(found, expected, **bound)


# Kernels

BUCKETS = 4
EVEN: Any = {"cap_mb": 0.02, "groups": (2 * LAYERS // BUCKETS,) * BUCKETS}
KERNELS = {"plain": Case(**EVEN), "accumulation": Case(**EVEN, passes=2), "kept": Case(**EVEN, keeps=True)}
COPIES_PER_BUCKET = {"plain": 1, "accumulation": 2, "kept": 0}
"""A copy into the bucket, and one back into gradients that were there before backward. Those that were kept lie in the
bucket already."""
DEVICE_EVENTS = ("kernel", "gpu_memcpy", "gpu_memset")


def kernels(device: str, how: str, name: str) -> list[str]:
    """Return the names of the kernels and copies of one regular step."""
    training = Training(device, how, KERNELS[name])
    for _ in range(4):
        training.step()
    torch.cuda.synchronize()
    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder:
        warnings.filterwarnings("ignore", "Warning: Profiler clears events")  # of torch 2.11
        for _ in range(2):  # the first profile of a process may miss events
            with profile(activities=[ProfilerActivity.CUDA]) as trace:
                training.step()
                torch.cuda.synchronize()
        path = Path(folder, "trace.json")
        trace.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    return [event["name"] for event in events if event.get("cat") in DEVICE_EVENTS]


@on_gpus("profiler")
@pytest.mark.parametrize("name", KERNELS)
def test_a_step_starts_few_kernels_per_bucket(one: World, name: str, record_property: Record) -> None:
    found = {how: one.run(kernels, DEVICE, how, name)[0] for how in HOWS}
    record_property("figure", ", ".join(f"{how} {len(names)}" for how, names in found.items()))
    assert found["plain"]
    own = {how: sum("nccl" not in kernel.lower() for kernel in names) for how, names in found.items()}
    for style in STYLES:
        more = Counter(found[style]) - Counter(found["plain"])
        assert len(found[style]) <= len(found["ddp"]) + 2 * BUCKETS, more
        assert own[style] <= own["plain"] + COPIES_PER_BUCKET[name] * BUCKETS, more


# Memory

MIB = 1 << 20
LARGE = Case(lambda: nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(24))), width=1024)
"""96 MiB of gradients."""


def peak_bytes(device: str, how: str) -> int:
    """Return the most memory that a regular step needs."""
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    training = Training(device, how, LARGE)
    for _ in range(3):
        training.step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    training.step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


@on_gpus("statistics of its memory")
def test_a_step_needs_no_more_memory_than_that_of_torch(one: World, record_property: Record) -> None:
    peaks = {how: one.run(peak_bytes, DEVICE, how)[0] for how in HOWS}
    record_property("figure", ", ".join(f"{how} {peak // MIB} MiB" for how, peak in peaks.items()))
    for style in STYLES:
        assert peaks[style] <= 1.05 * peaks["ddp"], peaks


def bytes_outside_torch(device: str) -> list[int]:
    """Return what plain torch, the first step and the first SyncBatchNorm take beside torch's own allocator."""

    def taken() -> int:
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        return total - free - torch.cuda.memory_reserved()

    start = taken()
    found = []
    for how, network in (("plain", mlp), ("module", mlp), ("plain", lambda: hvd.SyncBatchNorm(WIDTH))):
        Training(device, how, Case(network)).step()
        end = taken()
        found.append(end - start)
        start = end
    return found


@on_gpus("statistics of its memory")
def test_memory_outside_torch(fresh: World, record_property: Record) -> None:
    (found,) = fresh.run(bytes_outside_torch, DEVICE)
    plain, step, layer = (f"{number // MIB} MiB" for number in found)
    record_property("figure", f"kernels {plain}, first step {step}, first SyncBatchNorm {layer}")


# torch.compile


def compiled_losses(device: str, how: str, mode: str | None) -> list[float]:
    """Return the loss of each of 10 steps. mode: of torch.compile; None: not compiled."""
    case = Case(lambda: nn.Sequential(linear(), nn.GELU(), linear(), nn.LayerNorm(WIDTH), linear()))
    import torch._inductor.config as inductor

    with warnings.catch_warnings(), inductor.patch(compile_threads=1):  # no other processes
        warnings.simplefilter("ignore")  # of the compiler, as that TF32 is off
        torch.compiler.reset()
        training = Training(device, how, case)
        if mode is not None:
            training.model = torch.compile(training.model, mode=mode)
        return [float(training.step()) for _ in range(10)]


@on_gpus("compiler")
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("how", ["plain", *STYLES])
def test_a_compiled_model_trains_as_the_eager_one(
    one: World, how: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    need_programs("gcc")  # of triton
    need(Path(sysconfig.get_path("include"), "Python.h").exists(), "needs Python.h")
    monkeypatch.setattr(world_module, "RUN_SECONDS", 180.0)  # the compiler
    (expected,) = one.run(compiled_losses, DEVICE, "plain", None)
    (found,) = one.run(compiled_losses, DEVICE, how, mode)
    assert expected[-1] < expected[0]
    assert found == pytest.approx(expected, rel=1e-4)


# Dtypes and layouts

DTYPES = (
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64),
    *(torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool),
)
LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda whole: whole.contiguous(),
    "transposed": lambda whole: whole.transpose(0, 1),
    "channels_last": lambda whole: whole.contiguous(memory_format=torch.channels_last),
    "strided": lambda whole: whole[:, :, ::2, 1:],
    "empty": lambda whole: whole[:0],
    "one row": lambda whole: whole[:1].expand(4, 4, 4, 3),
}


def differing_calls(device: str) -> list[str]:
    """Return the calls whose results differ from those of the same call with tensors on the CPU."""
    whole = torch.arange(4 * 4 * 4 * 3).view(4, 4, 4, 3) % 7 + hvd.rank()
    differing = []
    for dtype in DTYPES:
        numbers = whole % 2 if dtype is torch.bool else whole
        for layout, arranged in LAYOUTS.items():
            for name, calls in CALLS.items():
                if layout == "one row" and name == "allreduce_":
                    continue  # several numbers in one place
                own, reference = (arranged(numbers.to(where, dtype, copy=True)) for where in (device, "cpu"))
                for call, is_async in zip(calls, (False, True), strict=True):
                    results = [call(tensor) for tensor in (own, reference)]
                    results = [hvd.synchronize(handle) for handle in results] if is_async else results
                    outputs, others = (list(x) if isinstance(x, tuple | list) else [x] for x in results)
                    is_there = all(output.device == own.device for output in outputs_of(outputs))
                    if not is_there or not all(map(_same, on_host(outputs), others)):
                        differing.append(f"{name}{'_async' * is_async} of {dtype}, {layout}")
    return differing


def _same(own: torch.Tensor, reference: torch.Tensor) -> bool:
    return own.dtype is reference.dtype and own.shape == reference.shape and torch.equal(own, reference)


def test_all_dtypes_and_layouts_give_the_numbers_of_the_cpu(either: World) -> None:
    assert either.run(differing_calls, DEVICE) == [[]] * either.size
