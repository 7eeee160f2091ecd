"""The accelerator of this machine, such as its GPUs: the only module that asks torch for the kind of device.

torch.accelerator describes CUDA, ROCm (which torch calls "cuda" as well), XPU and others in the same way. Before torch
2.6, which added it, each has a module with other names for the same functions.
"""

from __future__ import annotations

import contextlib
import functools
import os
from typing import Any

import torch

from .checks import converted
from .executor import in_time

_VISIBLE = (
    *(f"{prefix}_VISIBLE_DEVICES" for prefix in ("CUDA", "HIP", "ROCR", "ASCEND_RT", "MLU")),
    "ZE_AFFINITY_MASK",
)
"""Variables that select devices, and number the selected ones from 0."""


class _DeviceModule:
    """The functions of torch.accelerator, before torch 2.6."""

    def __getattr__(self, name: str) -> Any:
        names = {"set_device_index": "set_device", "current_device_index": "current_device"}
        return getattr(module(), names.get(name, name))


_accelerator: Any = getattr(torch, "accelerator", None) or _DeviceModule()


def kind() -> str | None:
    """Return the type of the accelerator, such as "cuda" or "xpu"; None if this machine has none that works."""
    # torch.accelerator.current_accelerator raises an error on a machine without a GPU before torch 2.7.
    found = torch._C._get_accelerator()  # the CPU if this build of torch has none
    return found.type if found.type != "cpu" and torch.get_device_module(found).is_available() else None


def module() -> Any:
    """Return torch's module for the accelerator, such as torch.cuda. There must be one."""
    return torch.get_device_module(kind())


def count() -> int:
    """Return how many devices this process sees."""
    return int(_accelerator.device_count()) if kind() else 0


def visible(*, by_uuid: bool = False) -> tuple[str, ...]:
    """Return a name of each device that this process sees. The processes of a host use the same name for a device.

    by_uuid: ask the driver, which starts to use the accelerator. Without it, the names are those of the variables, and
    processes that cgroups confine to one device each (srun --gpus-per-task) all call theirs "0".
    """
    variable = next((os.environ[name].split(",") for name in _VISIBLE if os.environ.get(name)), [])
    names = [*variable, *map(str, range(len(variable), count()))][: count()]
    if not by_uuid or not names:
        return tuple(names)
    properties = map(module().get_device_properties, range(len(names)))
    uuids = [str(getattr(found, "uuid", "")) for found in properties]
    if not all(uuid.strip("0-") for uuid in uuids):  # the driver gives none
        return tuple(names)
    # The parts of one GPU may share its UUID.
    return tuple(name if name.startswith("MIG-") else uuid for name, uuid in zip(names, uuids, strict=True))


def bind(device: torch.device) -> None:
    """Make `device` the current one of this thread."""
    _accelerator.set_device_index(device.index)


def current_device() -> torch.device | None:
    """Return the current device of this thread; None if this process has not used the accelerator."""
    return torch.device(str(kind()), _accelerator.current_device_index()) if is_started() else None


def current_stream(device: torch.device) -> torch.Stream | None:
    """Return the stream of this thread on `device`; None for the CPU."""
    return None if device.type == "cpu" else _accelerator.current_stream(device)


def has_streams(tensor: torch.Tensor) -> bool:
    """Return whether work on `tensor` is queued on streams, so that the host runs ahead of it."""
    return not tensor.is_cpu


def new_stream(device: torch.device) -> torch.Stream:
    """Return a new stream on `device`."""
    return torch.Stream(device)


def use_stream(stream: torch.Stream) -> contextlib.AbstractContextManager[Any]:
    """Make `stream` and its device the current ones of this thread in the `with` block."""
    if hasattr(stream, "__enter__"):
        return stream
    entered: contextlib.AbstractContextManager[Any] = torch.get_device_module(stream.device).stream(stream)
    return entered


def record_event(device: torch.device, stream: torch.Stream | None = None) -> torch.Event:
    """Return an event after all work on `stream`, or on this thread's stream on `device`."""
    event = torch.Event(device)
    event.record(stream or _accelerator.current_stream(device))
    return event


def wait_event(device: torch.device, event: torch.Event) -> None:
    """Make this thread's stream on `device` wait for `event`. The host does not wait."""
    _accelerator.current_stream(device).wait_event(event)


def keep_until_done(tensor: torch.Tensor, stream: torch.Stream) -> None:
    """Reuse the memory of `tensor`, dense or COO, only after what `stream` has to do now."""
    for part in (tensor._indices(), tensor._values()) if tensor.is_sparse else (tensor,):
        part.record_stream(stream)


def host_memory(length: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return memory of the host, ((length,), dtype), for copies from `device`. It is pinned, if possible.

    Copies then do not wait. torch takes a power of two of bytes (CachingHostAllocator.h), and keeps what is freed.
    """
    with contextlib.suppress(RuntimeError):  # the runtime of the device has none, or none left
        return torch.empty(length, dtype=dtype, device="cpu", pin_memory=device.type == kind())
    return torch.empty(length, dtype=dtype, device="cpu")


class StreamOrder:
    """Orders streams that one after the other add to the same memory on a device: each waits for the one before it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        raw = getattr(torch._C, f"_{device.type}_getCurrentRawStream", None)
        self.current_handle: Any = (
            functools.partial(raw, device.index) if raw else lambda: current_stream(device).stream_id  # type: ignore[union-attr]
        )
        """Return a number for the current stream of this thread. It is called for each gradient."""
        self.last: int | None = None
        """The number of the stream that came last."""
        self._stream: torch.Stream | None = None
        self.is_mixed = False
        """Whether there was more than one stream. Then memory is used on a stream that did not allocate it."""

    def follow(self) -> None:
        """Make the current stream of this thread wait for the one that came last, and be the last."""
        if (handle := self.current_handle()) != self.last:
            if self._stream is not None:
                wait_event(self._device, record_event(self._device, self._stream))
                self.is_mixed = True
            self.last, self._stream = handle, current_stream(self._device)


@functools.cache
def stream_order(device: torch.device) -> StreamOrder | None:
    """Return the order of the streams on which gradients of `device` arrive; None without streams.

    Autograd runs all hooks of a device in one thread.
    """
    return StreamOrder(device) if device.type == kind() else None


def is_started() -> bool:
    """Return whether this process has used the accelerator."""
    found = kind()
    return found is not None and bool(torch.get_device_module(found).is_initialized())


def synchronize(device: torch.device) -> None:
    """Wait for all work on `device`. Does nothing for the CPU."""
    if device.type == kind():
        _accelerator.synchronize(device)


def ends_within(device: torch.device, seconds: float) -> bool:
    """Wait at most `seconds` for all work on `device`. Return whether it has ended without an error."""
    with contextlib.suppress(TimeoutError, RuntimeError):  # or Python 3.12.1 ends, and starts no thread
        in_time(functools.partial(synchronize, device), seconds)
        return True
    return False


def checked_device(name: str, device: Any) -> torch.device:
    """Return `device`, the parameter `name`, as a torch.device. Raises TypeError if torch does not know it."""
    return converted(name, device, torch.device, "a device", "Pass hvd.device().", without=bool)
