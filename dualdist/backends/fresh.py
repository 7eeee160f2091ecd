"""A part of a store that outlives those who use it, for the processes of now alone.

torchrun's store serves all its restarts, each with other ranks and another size, and several programs one after
another. What the earlier ones have left cannot be told from what is new: they may have ended before they came here,
and torchrun's own numbers are no help: TORCHELASTIC_RESTART_COUNT counts the failures of one agent alone. So rank 0
makes up a name and gives it to whoever calls with a token that was not there before.
"""

from __future__ import annotations

import secrets
import time
from datetime import timedelta

import torch.distributed as dist

from ..errors import ConfigurationError

__all__ = ("fresh_part",)

_POLL_SECONDS = 0.01


def fresh_part(store: dist.Store, rank: int, size: int, timeout: timedelta, advice: str) -> dist.Store:
    """Return the part of `store` that these `size` processes have for themselves. Collective.

    timeout: how long to wait for another process. advice: what to do when none comes, for the error.
    Raises ConfigurationError when one does not come.
    """
    token = secrets.token_hex(8)
    if rank == 0:
        part = dist.PrefixStore(f"dualdist/{token}", store)
        _hand_out(store, part, token, size, timeout, advice)
        return part
    store.set(f"dualdist/call/{rank}", token)
    try:
        store.wait([f"dualdist/answer/{token}"], timeout)
    except RuntimeError as error:
        raise _did_not_come(rank, "0", timeout, advice) from error
    part = dist.PrefixStore(f"dualdist/{store.get(f'dualdist/answer/{token}').decode()}", store)
    part.set(f"come/{rank}", "")
    return part


def _hand_out(
    store: dist.Store, part: dist.Store, name: str, size: int, timeout: timedelta, advice: str
) -> None:
    """Answer every call, also those of the past, until all who call now have come."""
    answered: dict[int, bytes] = {}
    awaited = list(range(1, size))
    deadline = time.monotonic() + timeout.total_seconds()
    while awaited := [rank for rank in awaited if not part.check([f"come/{rank}"])]:
        for rank in awaited:
            call = f"dualdist/call/{rank}"
            if store.check([call]) and (token := store.get(call)) != answered.get(rank):
                store.set(f"dualdist/answer/{token.decode()}", name)
                answered[rank] = token
        if time.monotonic() > deadline:
            raise _did_not_come(0, ", ".join(map(str, awaited)), timeout, advice)
        time.sleep(_POLL_SECONDS)


def _did_not_come(rank: int, others: str, timeout: timedelta, advice: str) -> ConfigurationError:
    return ConfigurationError(
        f"Rank {rank} waited {timeout.total_seconds():.0f} s for rank {others}, which did not come. {advice}"
    )
