"""Gathering texts before any backend runs. Without one rank, all others raise an error that names it."""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.distributed import HashStore

from dualdist.backends.store import store_gather
from dualdist.errors import ConfigurationError
from dualdist.meeting import Gather, gather, reporting_errors
from dualdist.meeting.gather import (
    gather_through,
    gather_through_files,
    gather_through_http,
    gather_through_server,
)
from dualdist.meeting.keyvalue import LONGEST_VALUE, KeyValueClient, KeyValueServer
from dualdist.types import Launch

SECRET = b"s" * 32
Make = Callable[[int, float, contextlib.ExitStack], Gather]
"""Makes the Gather of a rank of three. Takes the timeout in seconds, and what cleans up."""


@contextlib.contextmanager
def through_server(_: Path) -> Iterator[Make]:
    with KeyValueServer("127.0.0.1", secret=SECRET) as server:

        def make(rank: int, timeout: float, cleanup: contextlib.ExitStack) -> Gather:
            client = cleanup.enter_context(KeyValueClient(server.host, server.port, SECRET))
            return gather_through_server(Launch("x", rank, 3), client, timeout, cleanup)

        yield make


@contextlib.contextmanager
def through_files(folder: Path) -> Iterator[Make]:
    yield lambda rank, timeout, cleanup: gather_through_files(
        Launch("x", rank, 3), folder / "job", timeout, cleanup
    )


class Values(http.server.BaseHTTPRequestHandler):
    """horovodrun's server: PUT sets a value, GET returns it or 404."""

    values: dict[str, bytes]

    def do_PUT(self) -> None:
        self.values[self.path] = self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.end_headers()

    def do_GET(self) -> None:
        value = self.values.get(self.path)
        self.send_response(200 if value is not None else 404)
        self.end_headers()
        self.wfile.write(value or b"")

    def log_message(self, *_: object) -> None:
        pass


@contextlib.contextmanager
def through_http(_: Path) -> Iterator[Make]:
    Values.values = {}
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Values) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"127.0.0.1:{server.server_address[1]}"
        yield lambda rank, timeout, cleanup: gather_through_http(
            Launch("x", rank, 3), address, timeout, cleanup
        )
        server.shutdown()


@contextlib.contextmanager
def through_store(_: Path) -> Iterator[Make]:
    store = HashStore()
    yield lambda rank, timeout, _: store_gather(store, rank, 3, timeout)


@pytest.fixture(params=[through_server, through_files, through_http, through_store])
def make(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    # A wait for this time, in place of one for the others, would end the test.
    monkeypatch.setattr(gather, "_FAREWELL_SECONDS", 100.0)
    with request.param(tmp_path) as made:
        yield made


def error_of(make: Make, timeout: float, rank: int) -> str:
    """Gather without some ranks, clean up, and return the error."""
    with contextlib.ExitStack() as cleanup, pytest.raises(ConfigurationError) as caught:
        make(rank, timeout, cleanup)("here")
    return str(caught.value)


def test_all_ranks_get_all_texts(make: Make) -> None:
    # A rank may only clean up when all have read.
    with contextlib.ExitStack() as cleanup, ThreadPoolExecutor(3) as pool:

        def take_part(rank: int) -> list[list[str]]:
            gather = make(rank, 60.0, cleanup)
            return [gather(f"one {rank}"), gather(f"two {rank}")]

        for found in pool.map(take_part, range(3)):
            assert found == [[f"one {rank}" for rank in range(3)], [f"two {rank}" for rank in range(3)]]


@pytest.mark.parametrize("missing", range(3))
def test_all_that_arrived_name_the_rank_that_did_not(make: Make, missing: int) -> None:
    arrived = [rank for rank in range(3) if rank != missing]
    with ThreadPoolExecutor(2) as pool:
        for error in pool.map(partial(error_of, make, 1.0), arrived):
            assert f"waited 1 s for rank {missing}, which did not arrive. Look at its output" in error
            assert "DUALDIST_START_TIMEOUT_SECONDS" in error


def test_the_rank_that_arrived_first_ends_the_wait_of_all(make: Make) -> None:
    with ThreadPoolExecutor(2) as pool:
        first, last = pool.map(partial(error_of, make), (600.0, 1.0), (0, 2))
    assert first == last
    assert "Rank 2 waited 1 s for rank 1, which did not arrive" in last


@pytest.mark.parametrize("make", [through_store], indirect=True)  # the others remove their keys
def test_rank_0_that_arrives_too_late_raises_the_error_of_the_rank_that_gave_up(make: Make) -> None:
    error = error_of(make, 0.0, 1)
    assert "Rank 1 waited 0 s for ranks 0, 2, which did not arrive" in error
    assert error_of(make, 600.0, 0) == error


def test_a_rank_names_rank_0_where_it_has_arrived_and_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 is missing as well, because it waits for rank 0 in the step before."""
    monkeypatch.setattr(gather, "_FAREWELL_SECONDS", 0.1)
    store = HashStore()
    store.set("0.0", "+here")
    with pytest.raises(ConfigurationError, match="Rank 2 waited 0 s for rank 0, which did not arrive"):
        store_gather(store, 2, 3, 0.1)("here")


def test_the_rank_that_reports_an_error_does_so_before_any_other_raises_it(make: Make) -> None:
    seen: list[tuple[int, bool]] = []

    def fail(rank: int, timeout: float) -> str:
        with reporting_errors(lambda error, is_own: seen.append((rank, is_own))):
            return error_of(make, timeout, rank)

    with ThreadPoolExecutor(2) as pool:
        assert len(set(pool.map(fail, (0, 2), (1.0, 600.0)))) == 1
    assert seen == [(0, True), (2, False)]


@pytest.mark.parametrize("make", [through_server, through_store], indirect=True)
def test_nobody_asks_again_and_again_where_the_store_can_wait(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gather, "time", SimpleNamespace(monotonic=time.monotonic))
    test_all_ranks_get_all_texts(make)


def test_the_texts_of_32768_ranks_fit_into_one_value() -> None:
    nodes = [
        f"nid{node:06d}.cluster.example.org-{hashlib.sha256(str(node).encode()).hexdigest()[:8]}"
        for node in range(4096)
    ]
    texts = [json.dumps([nodes[rank // 8], ""]) for rank in range(32768)]  # as find_addresses gathers them
    values = {f"0.{rank}": "+" + text for rank, text in enumerate(texts)}

    def get(keys: Sequence[str], seconds: float) -> list[str] | None:
        return [values[key] for key in keys] if set(keys) <= values.keys() else None

    assert gather_through(0, len(texts), values.__setitem__, get, 1.0)(texts[0]) == texts
    assert sum(map(len, texts)) > LONGEST_VALUE > len(values["0.all"])


def test_rank_0_checks_the_keys_of_many_ranks_in_one_request() -> None:
    store = {f"0.{rank}": "+" for rank in range(1, 64)}
    requests = []

    def get(keys: Sequence[str], seconds: float) -> list[str] | None:
        requests.append(keys)
        return [store[key] for key in keys] if store.keys() >= set(keys) else None

    gather = gather_through(0, 64, store.__setitem__, get, 1.0, pause=lambda seconds: None)
    assert gather("") == [""] * 64
    assert len(requests) == 4, "the answer, whether all texts are there, the texts, and the answer"
