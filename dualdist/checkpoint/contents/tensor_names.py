"""Names of a module's tensors, with or without wrappers, and which saved tensors a module can load."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

__all__ = ("few", "match", "without_wrappers")

_WRAPPERS = {"module", "_orig_mod"}
"""The attributes in which torch's DDP and DataParallel, AveragedModel and torch.compile hold the wrapped module."""
_SHOWN = 3


def without_wrappers(name: str) -> str:
    """Return `name` without the parts that wrappers add."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def match(own: Mapping[str, Any], saved: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the part of `saved` that a module with the state `own` can load, under its names, and what does not match.

    If the names differ, they are compared without the parts that wrappers add, except where that would make two names
    of one state equal.
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
    mismatched = {entry.partition(": ")[0] for entry in shapes}
    fitting = {name: value for name, value in given.items() if name in own and name not in mismatched}
    kinds = (("missing", missing), ("unexpected", unexpected), ("of another shape", shapes))
    return fitting, [f"{len(found)} {kind} ({few(found)})" for kind, found in kinds if found]


def _is_lazy(value: torch.Tensor) -> bool:
    return torch.nn.parameter.is_lazy(value)


def few(names: Sequence[str]) -> str:
    """Return the first three names as text, and how many more there are."""
    more = f", and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
