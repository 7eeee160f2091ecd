"""A part of a store for the processes of now, whatever earlier ones have left in it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch.distributed import HashStore, PrefixStore, Store

from dualdist.backends.fresh import fresh_part
from dualdist.errors import ConfigurationError

SECONDS = timedelta(seconds=30)


def meet(store: Store, size: int) -> list[str]:
    """Have `size` processes come, say who they are in their part, and return what the last one finds there."""
    with ThreadPoolExecutor(size) as pool:
        parts = list(pool.map(lambda rank: fresh_part(store, rank, size, SECONDS, ""), range(size)))
    found = [name for name in map(str, range(9)) if parts[-1].check([name])]
    for rank, part in enumerate(parts):
        part.set(str(rank), "here")
    assert all(part.check([str(rank) for rank in range(size)]) for part in parts)
    return found


def test_each_start_has_a_part_of_its_own_whatever_the_size() -> None:
    store = HashStore()
    for size in (3, 2, 4, 1, 3):
        assert meet(store, size) == []


def test_who_died_before_all_had_come_disturbs_nobody() -> None:
    store = HashStore()
    store.set("dualdist/call/1", "from the past")
    store.set("dualdist/call/2", "from a larger world")
    assert meet(store, 2) == []


def test_who_does_not_come_is_named_on_every_rank() -> None:
    store = PrefixStore("job", HashStore())
    short = timedelta(milliseconds=300)
    store.set_timeout(short)
    with ThreadPoolExecutor(2) as pool:
        first, last = (pool.submit(fresh_part, store, rank, 3, short, "Look.") for rank in (0, 2))
        with pytest.raises(
            ConfigurationError, match=r"Rank 0 waited 0 s for rank 1, which did not come\. Look"
        ):
            first.result()
        last.result()
    with pytest.raises(ConfigurationError, match=r"Rank 1 waited 0 s for rank 0, which did not come\. Look"):
        fresh_part(store, 1, 3, short, "Look.")
