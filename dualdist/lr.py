"""Learning rates for larger batches: scaling and warm-up, only on request, with torch's own schedulers.

Goyal et al. 2017, https://arxiv.org/abs/1706.02677: if the batch is k times as large, multiply the learning rate by k,
and raise it over the first steps from the unscaled value.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LinearLR, LRScheduler, SequentialLR

from .core.checks import instance, integer, number, wrong
from .core.lifecycle import size

__all__ = ("scaled", "warmup")

RULES: dict[str, Callable[[float], float]] = {"linear": float, "sqrt": math.sqrt}


def scaled(lr: float, factor: float | None = None, *, rule: str = "linear") -> float:
    """Return the learning rate for a batch `factor` times as large as the one that `lr` was chosen for. Local.

    Args:
        lr: the learning rate for one process.
        factor: None: the size of the world. With accumulation over n steps, pass `n * hvd.size()`.
        rule: "linear" (SGD) or "sqrt" (often used with Adam).

    Raises:
        TypeError, ValueError: an argument is wrong.
        NotInitializedError: without a factor, before `init()`.
    """
    factor = _checked(factor)
    if not isinstance(rule, str) or rule not in RULES:
        raise wrong("rule", f"one of {', '.join(RULES)}", rule)
    return number("lr", lr) * RULES[rule](factor)


def warmup(
    optimizer: Optimizer, steps: int, factor: float | None = None, *, then: LRScheduler | None = None
) -> LRScheduler:
    """Return a scheduler that raises the learning rate linearly from 1/`factor` of its value to its full value. Local.

    Args:
        optimizer: its learning rate is the value at the end of the warm-up.
        steps: the length of the warm-up, in calls of `scheduler.step()`; 0: no warm-up.
        factor: None: the size of the world, so that a linearly scaled rate starts at the rate for one process.
        then: the scheduler after the warm-up, such as a CosineAnnealingLR. It counts its steps from there.

    Raises:
        TypeError, ValueError: an argument is wrong.
        NotInitializedError: without a factor, before `init()`.
    """
    fix = "Pass the optimizer that is trained."
    instance("optimizer", optimizer, Optimizer, "a torch.optim.Optimizer", fix)
    steps, factor = integer("steps", steps, least=0), _checked(factor)
    if then is not None:
        fix = "Make it with the same optimizer."
        instance("then", then, LRScheduler, "a scheduler of torch or None", fix)
    if steps == 0 and then is not None:
        return then
    rise = LinearLR(optimizer, start_factor=1 / factor if steps else 1.0, total_iters=max(1, steps))
    return rise if then is None else SequentialLR(optimizer, [rise, then], milestones=[steps])


def _checked(factor: float | None) -> float:
    if factor is None:
        return float(size())
    return number("factor", factor, least=1, fix="Pass None for hvd.size().")
