"""Warns once when ranks start from different parameters or options, which no exchange of gradients makes equal.

Without broadcast_parameters(), or with another learning rate on one rank, each rank trains a model of its own, and
losses look normal. The ranks compare one digest when they first combine gradients, and more only if it differs.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Mapping, Sequence

import torch

from ..collectives.allreduce import allreduce_
from ..types import Min
from ..world.process_sets import ProcessSet, channel_of
from .tracked_parameter import TrackedParameter

__all__ = ("warn_of_differences",)

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SHOWN = 5


def warn_of_differences(
    params: Sequence[TrackedParameter], options: Mapping[str, object], process_set: ProcessSet, number: int
) -> None:
    """Warn on the first rank of `process_set` if parameters or `options` differ between ranks. Collective.

    The host waits for the device of the parameters.

    Args:
        options: numbers by name. The names are equal on all ranks, because the class of the optimizer is.
        number: of the reducer.
    """
    names = [*(repr(param.name) for param in params), *options]
    values = torch.cat([_checksums(params), torch.tensor([_hash(repr(value)) for value in options.values()])])
    digest = torch.tensor([_hash(repr((names, values.tolist())))])
    name = f"dualdist.start.{number}"
    if not _differs(digest, name, process_set).any():
        return
    wrong = [
        name
        for name, differs in zip(names, _differs(values, f"{name}.values", process_set), strict=True)
        if differs
    ]
    if channel_of(process_set).group.rank == 0:
        more = f" and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        warnings.warn(
            f"The ranks start with different values of {', '.join(wrong[:_SHOWN])}{more}, and will train different "
            "models. Call broadcast_parameters(model.state_dict(), root_rank=0) and broadcast_optimizer_state("
            "optimizer, root_rank=0) before training. DUALDIST_COMPARE_START=0 switches this comparison off.",
            UserWarning,
            stacklevel=2,
        )


def _differs(values: torch.Tensor, name: str, process_set: ProcessSet) -> torch.Tensor:
    """Return which of `values`, (n,) int64 on the CPU, differ between ranks, (n,) bool. Collective."""
    both = allreduce_(torch.stack([values, -values]), op=Min, name=name, process_set=process_set)
    return both[0].ne(-both[1])


@torch.no_grad()
def _checksums(params: Sequence[TrackedParameter]) -> torch.Tensor:
    """Return a sum of the bits of each parameter, (n,) int64 on the CPU."""
    sums: list[torch.Tensor] = []
    for param in params:
        data = param.tensor.data
        if type(data) is not torch.Tensor or data.is_quantized or data.is_meta:
            sums.append(torch.tensor(0, device=params[0].device))  # its bits cannot be read
            continue
        data = (torch.view_as_real(data) if data.is_complex() else data).contiguous().reshape(-1)
        sums.append(data.view(_WORDS[data.element_size()]).sum(dtype=torch.int64))
    devices = {one.device for one in sums}
    if len(devices) == 1:  # one wait for the device, not one for each parameter
        return torch.stack(sums).cpu()
    return torch.tensor([int(one) for one in sums], dtype=torch.int64)


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")
