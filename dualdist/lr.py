"""Learning rates for larger batches: scaling and warm-up, only on request, with torch's own schedulers.

Goyal et al. 2017, https://arxiv.org/abs/1706.02677: if the batch is k times as large, multiply the learning rate by k,
and raise it over the first steps from the unscaled value.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LinearLR, LRScheduler, SequentialLR

from .world.ranks import size

__all__ = ("scaled", "warmup")

RULES: dict[str, Callable[[float], float]] = {"linear": float, "sqrt": math.sqrt}


def scaled(lr: float, factor: float | None = None, *, rule: str = "linear") -> float:
    """Return the learning rate for a batch that is `factor` times as large as the batch that `lr` was chosen for.

    Args:
        lr: the learning rate for one process.
        factor: None: the size of the world. With accumulation over n steps, pass `n * hvd.size()`.
        rule: "linear" (SGD) or "sqrt" (often used with Adam).
    """
    factor = _checked(factor)
    if rule not in RULES:
        raise ValueError(f"`rule` must be one of {', '.join(RULES)}, but is {rule} instead.")
    return lr * RULES[rule](factor)


def warmup(
    optimizer: Optimizer, steps: int, factor: float | None = None, *, then: LRScheduler | None = None
) -> LRScheduler:
    """Return a scheduler that raises the learning rate linearly from 1/`factor` of its value to its full value.

    Args:
        optimizer: its learning rate is the value at the end of the warm-up.
        steps: the length of the warm-up, in calls of `scheduler.step()`; 0: no warm-up.
        factor: None: the size of the world, so that a linearly scaled rate starts at the rate for one process.
        then: the scheduler after the warm-up, such as a CosineAnnealingLR. It counts its steps from there.
    """
    if steps < 0:
        raise ValueError(f"`steps` must be at least 0, but is {steps} instead.")
    factor = _checked(factor)
    if steps == 0 and then is not None:
        return then
    rise = LinearLR(optimizer, start_factor=1 / factor if steps else 1.0, total_iters=max(1, steps))
    return rise if then is None else SequentialLR(optimizer, [rise, then], milestones=[steps])


def _checked(factor: float | None) -> float:
    factor = size() if factor is None else factor
    if not 1 <= factor < math.inf:
        raise ValueError(f"`factor` must be at least 1 and finite, but is {factor} instead.")
    return factor
