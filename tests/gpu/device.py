"""The device of these tests: the first GPU, without one the simulated accelerator (tests/accelerator)."""

from __future__ import annotations

import pytest
import torch

from .. import accelerator as simulated
from ..helpers.world_worker import DEVICE as VARIABLE
from ..helpers.world_worker import use_simulated_device

IS_GPU = torch.cuda.is_available()
KIND, TRANSPORT = ("cuda", "nccl") if IS_GPU else ("npu", "hccl")
DEVICE = f"{KIND}:0"
VARIABLES = {} if IS_GPU else {VARIABLE: "own"}
"""What gives each rank the simulated device."""

needs_device = [
    pytest.mark.gpu,
    pytest.mark.skipif(not IS_GPU and simulated.missing() is not None, reason=str(simulated.missing())),
]


def on_gpus(what: str) -> pytest.MarkDecorator:
    """Return the mark of a test that needs what only GPUs have."""
    return pytest.mark.skipif(not IS_GPU, reason=f"needs a GPU: the simulated accelerator has no {what}")


def load() -> None:
    """Make DEVICE known to torch in a process that no world has started."""
    use_simulated_device()


def sleep(milliseconds: int) -> None:
    """Keep the current stream busy. The host does not wait."""
    if IS_GPU:
        torch.cuda._sleep(2_000_000 * milliseconds)  # cycles
    else:
        simulated.sleep_ms(milliseconds)
