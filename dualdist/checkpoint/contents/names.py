"""Names of a module's tensors, whatever wraps the module, and what fits between two sets of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

__all__ = ("few", "fit", "without_wrappers")

_WRAPPERS = {"module", "_orig_mod"}
"""Under these, torch's DDP and DataParallel, AveragedModel and torch.compile hold the module they wrap."""
_SHOWN = 3


def without_wrappers(name: str) -> str:
    """Return `name` without the parts that wrappers add."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def fit(own: Mapping[str, Any], saved: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return what of `saved` a module whose state is `own` can load, under its names, and what does not fit.

    Names that are equal are taken first. If any are left, all are compared without the parts that wrappers add,
    unless that makes two of them equal.
    """
    given = dict(saved)
    if own.keys() != saved.keys():
        mine, theirs = ({without_wrappers(name): name for name in names} for names in (own, saved))
        if len(mine) == len(own) and len(theirs) == len(saved):
            given = {mine.get(name, theirs[name]): saved[theirs[name]] for name in theirs}
    missing = [name for name in own if name not in given]
    unexpected = [name for name in given if name not in own]
    shapes = [
        f"{name}: {tuple(given[name].shape)} instead of {tuple(value.shape)}"
        for name, value in own.items()
        if isinstance(value, torch.Tensor)
        and isinstance(given.get(name), torch.Tensor)
        and not _is_lazy(value)
        and given[name].shape != value.shape
    ]
    misfits = {entry.partition(": ")[0] for entry in shapes}
    fitting = {name: value for name, value in given.items() if name in own and name not in misfits}
    told = (("missing", missing), ("unexpected", unexpected), ("of another shape", shapes))
    return fitting, [f"{len(found)} {what} ({few(found)})" for what, found in told if found]


def _is_lazy(value: torch.Tensor) -> bool:
    return torch.nn.parameter.is_lazy(value)


def few(names: Sequence[str]) -> str:
    """Return the first names, and how many more there are."""
    more = f", and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
