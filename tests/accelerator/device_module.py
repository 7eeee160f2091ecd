"""torch's module for the simulated accelerator, as torch.cuda is for CUDA."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Event as Event
from torch import Stream as Stream

extension: Any = None


def _index(device: Any = None) -> int:
    index = device if isinstance(device, int) or device is None else torch.device(device).index
    return extension.current_device() if index is None or index < 0 else index


class device:
    """A context in which another device is the current one."""

    def __init__(self, device: Any) -> None:
        self._index = _index(device)

    def __enter__(self) -> None:
        self._before = extension.current_device()
        extension.set_device(self._index)

    def __exit__(self, *_: object) -> None:
        extension.set_device(self._before)


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return bool(extension.is_initialized())


def _lazy_init() -> None:
    extension.init()


def _is_in_bad_fork() -> bool:
    return False


def device_count() -> int:
    return int(extension.device_count())


def current_device() -> int:
    return int(extension.current_device())


def set_device(device: Any) -> None:
    extension.set_device(_index(device))


def synchronize(device: Any = None) -> None:
    torch.accelerator.synchronize(_index(device))


def current_stream(device: Any = None) -> torch.Stream:
    return torch.accelerator.current_stream(_index(device))


def stream(stream: torch.Stream) -> torch.Stream:
    return stream


def empty_cache() -> None:
    pass


def get_device_properties(device: Any = None) -> SimpleNamespace:
    return SimpleNamespace(name="simulated", uuid=f"simulated-{_index(device)}", total_memory=4 << 30)


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.float16, torch.bfloat16]


def get_rng_state(device: Any = None) -> torch.Tensor:
    return extension.generator(_index(device)).get_state()


def set_rng_state(state: torch.Tensor, device: Any = None) -> None:
    extension.generator(_index(device)).set_state(state)


def manual_seed_all(seed: int) -> None:
    for index in range(device_count()):
        extension.generator(index).manual_seed(seed)


manual_seed = manual_seed_all


def initial_seed() -> int:
    return int(extension.generator(current_device()).initial_seed())
