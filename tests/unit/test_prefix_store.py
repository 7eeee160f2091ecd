"""A part of a store for the current processes, whatever earlier ones have left in it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import FileStore, HashStore, PrefixStore, Store, TCPStore

from dualdist.backends import store
from dualdist.backends.store import _has_queues, new_prefix_store
from dualdist.errors import ConfigurationError

SECONDS = timedelta(seconds=30)


Open = Callable[[], Store]
"""Opens the store in one process."""


@pytest.fixture(params=["with queues", "without"])
def open_store(request: pytest.FixtureRequest, tmp_path: Path) -> Open:
    if request.param == "without":
        return lambda: FileStore(str(tmp_path / "store"))
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return server.clone  # a connection waits for one key at a time


def arrive(store: Store, rank: int, size: int, seconds: timedelta) -> Store:
    part, gather = new_prefix_store(store, rank, size, seconds, "Look.")
    for text in ("I am", "I am still"):
        assert gather(f"{text} {rank}") == [f"{text} {other}" for other in range(size)]
    return part


def send(store: Store, rank: int, token: str) -> None:
    """Send a token as a process of another start does."""
    if _has_queues(store):
        store.queue_push("dualdist/calls", token.encode())
    else:
        store.set(f"dualdist/call/{rank}", token)


def meet(open_store: Open, size: int) -> list[str]:
    """Let `size` processes make their part, return the keys that the last one finds there, and set a key per rank."""
    with ThreadPoolExecutor(size) as pool:
        parts = list(pool.map(lambda rank: arrive(open_store(), rank, size, SECONDS), range(size)))
    found = [name for name in map(str, range(9)) if parts[-1].check([name])]
    for rank, part in enumerate(parts):
        part.set(str(rank), "here")
    for part in parts:
        part.wait([str(rank) for rank in range(size)], SECONDS)
    return found


def test_each_start_has_a_part_of_its_own_whatever_the_size(open_store: Open) -> None:
    for size in (3, 2, 4, 1, 3):
        assert meet(open_store, size) == []


def test_processes_that_died_before_all_had_arrived_disturb_nobody(open_store: Open) -> None:
    store = open_store()
    send(store, 1, "from the past")
    send(store, 2, "from a larger world")
    assert meet(open_store, 2) == []


def test_rank_0_replies_to_no_other_process_when_all_have_arrived(open_store: Open) -> None:
    def run(rank: int) -> None:
        store = open_store()
        _, gather = new_prefix_store(store, rank, 2, SECONDS, "")
        gather("first")
        if rank == 1:
            send(store, 1, "too late")
        gather("second")

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(run, range(2)))
    assert not open_store().check(["dualdist/answer/too late"])


@pytest.mark.parametrize("open_store", ["with queues"], indirect=True)
def test_rank_0_does_not_ask_again_and_again_while_a_rank_is_late(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "time", None)
    assert meet(open_store, 3) == []


def test_a_missing_rank_is_named_on_every_rank() -> None:
    store = PrefixStore("job", HashStore())
    short = timedelta(milliseconds=300)
    store.set_timeout(short)
    with ThreadPoolExecutor(2) as pool:
        first, last = (pool.submit(arrive, store, rank, 3, short) for rank in (0, 2))
        for result in (first, last):
            with pytest.raises(
                ConfigurationError, match=r"Rank [02] waited 0 s for rank 1, which did not arrive\. Look"
            ):
                result.result()
    with pytest.raises(
        ConfigurationError, match=r"Rank 1 waited 0 s for rank 0, which did not arrive\. Look"
    ):
        arrive(store, 1, 3, short)
