"""Runs torch's tests of GPUs on the CPU: whatever device a test asks for, its tensors are on the CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class CpuInPlaceOfGpu(TorchFunctionMode):
    """Replaces GPUs among the arguments of torch's functions by the CPU."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if function is torch.Tensor.cuda:
            return args[0]
        if function is torch.Tensor.to:
            args = (args[0], *(_cpu(value) for value in args[1:]))
        if "device" in kwargs:
            kwargs["device"] = _cpu(kwargs["device"])
        return function(*args, **kwargs)


def _cpu(device: Any) -> Any:
    """Return the CPU if `device` is a GPU or its number, else `device` itself."""
    is_number = isinstance(device, int) and not isinstance(device, bool)
    is_name = isinstance(device, str) and device.startswith("cuda")
    is_gpu = isinstance(device, torch.device) and device.type == "cuda"
    return torch.device("cpu") if is_number or is_name or is_gpu else device


def use_cpu() -> None:
    """Use the CPU from here on in this process, and ignore which GPU a test chooses."""
    CpuInPlaceOfGpu().__enter__()  # type: ignore[no-untyped-call]
    torch.cuda.set_device = lambda device: None
    torch.cuda.synchronize = lambda device=None: None
    torch.cuda.current_device = lambda: 0
