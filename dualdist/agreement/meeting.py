"""How the members of a process set learn each other's addresses, and that one of them cannot connect."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ..backends.store_keys import get_all
from ..errors import HorovodInternalError

__all__ = ("Meeting",)

_POLL_SECONDS = (0.005, 0.2)
"""The first and the longest pause between two questions. Thousands of members may ask one store."""


class Meeting:
    """The keys of one process set in c10d's Store. When one member fails, all raise its error."""

    def __init__(
        self,
        store: Any,
        key: str,
        ranks: Sequence[int],
        place: int,
        timeout: float,
        check_start: Callable[[BaseException | None], None] = lambda cause: None,
    ) -> None:
        """Make a meeting.

        ranks: global ranks of the members. place: of this process among them. timeout: seconds for all calls.
        check_start: raises HorovodInternalError if a rank of the world has ended during its start. Its argument is
        the error of this rank that such an end may have caused, or None.
        """
        self._store = store
        self._key = key
        self._ranks = ranks
        self._place = place
        self._timeout = timeout
        self._check_start = check_start
        self._deadline = time.monotonic() + timeout

    def publish(self, host: str, port: int, token: bytes) -> None:
        """Publish the address of this process, and the token with which others must call it."""
        self._store.set(f"{self._key}/{self._place}", json.dumps([host, port, token.hex()]))

    def wait_for(self, places: Iterable[int]) -> dict[int, tuple[str, int, bytes]]:
        """Return what the members at `places` have published. Waits for them. Raises HorovodInternalError."""
        missing = sorted(places)
        keys = [f"{self._key}/{place}" for place in missing]
        pause, longest = _POLL_SECONDS
        # Not Store.wait: after a timeout, TCPStore prints warnings.
        while not self._store.check(keys):
            self.check(
                place for place, key in zip(missing, keys, strict=True) if not self._store.check([key])
            )
            time.sleep(pause)
            pause = min(2 * pause, longest)
        endpoints = map(json.loads, get_all(self._store, keys))
        return {
            place: (host, port, bytes.fromhex(token))
            for place, (host, port, token) in zip(missing, endpoints, strict=True)
        }

    def left(self) -> float:
        """Return how many seconds are left, at least 1 ms: a timeout of 0 makes a socket non-blocking."""
        return max(1e-3, self._deadline - time.monotonic())

    def check(self, missing: Iterable[int]) -> None:
        """Raise HorovodInternalError when another member has failed, or when the time is over.

        missing: the places of the members for which this process waits.
        """
        if self._store.check([f"{self._key}/failure"]):
            raise HorovodInternalError(self._store.get(f"{self._key}/failure").decode())
        self._check_start(None)
        if time.monotonic() > self._deadline:
            raise self.failure(missing, TimeoutError(f"nothing arrived for {self._timeout:g} s"))

    def failure(self, missing: Iterable[int], cause: OSError | RuntimeError) -> HorovodInternalError:
        """Return the error of a member that cannot connect to those at `missing`, after sending it to the others.

        If another member has failed already, return its error instead. Raises HorovodInternalError if `cause` is the
        consequence of the end of a rank during the start.
        """
        self._check_start(cause)
        ranks = sorted(self._ranks[place] for place in missing)
        text = (
            f"Rank {self._ranks[self._place]} could not connect to rank{'s' * (len(ranks) > 1)} "
            f"{', '.join(map(str, ranks))} of {list(self._ranks)}: {cause}. Look at their output."
        )
        # Without the store, rank 0 has ended.
        with contextlib.suppress(RuntimeError):
            if self._store.check([f"{self._key}/failure"]):
                text = self._store.get(f"{self._key}/failure").decode()
            else:
                self._store.set(f"{self._key}/failure", text)
        return HorovodInternalError(text)
