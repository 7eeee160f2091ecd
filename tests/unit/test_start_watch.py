"""What the ranks report about one that does not connect to the watch of the start."""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import HashStore

from dualdist.backends.start_watch import StartWatch
from dualdist.errors import HorovodInternalError


def test_ranks_name_one_that_never_connected_when_a_step_takes_too_long() -> None:
    """Rank 2 has ended between its arrival and its connection."""
    store, released = HashStore(), threading.Event()
    with contextlib.ExitStack() as stack:
        watches = [StartWatch(store, rank, 3, "127.0.0.1", 60.0) for rank in (0, 1)]
        for watch in watches:
            stack.callback(watch.close, started=False)
        stack.callback(released.set)

        def error_of(watch: StartWatch, seconds: float) -> str:
            with pytest.raises(HorovodInternalError) as caught:
                watch.run(released.wait, seconds)
            return str(caught.value)

        with ThreadPoolExecutor(2) as pool:
            errors = list(pool.map(error_of, watches, (0.1, 600.0)))
    assert "Rank 0 could not connect to the other ranks: rank 2 did not arrive." in errors[0]
    assert "Rank 1 could not connect to the other ranks: rank 2 has ended, is stopped," in errors[1]
