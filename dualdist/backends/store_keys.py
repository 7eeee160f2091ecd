"""Reading many keys of c10d's Store at once."""

from __future__ import annotations

import torch.distributed as dist

__all__ = ("get_all",)


def get_all(store: dist.Store, keys: list[str]) -> list[bytes]:
    """Return the values of `keys`, which must be set, in one call if the store has `multi_get`."""
    if store.has_extended_api():  # type: ignore[attr-defined]
        return list(store.multi_get(keys))
    return [store.get(key) for key in keys]
