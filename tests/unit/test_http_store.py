"""The HTTP server at which Horovod's controllers meet."""

from __future__ import annotations

import http.client
from collections.abc import Iterator

import pytest

from dualdist.horovod import http_store
from dualdist.horovod.http_store import HttpStore


@pytest.fixture
def store() -> Iterator[HttpStore]:
    with HttpStore("127.0.0.1", {"global": 2, "local_here": 1}) as served:
        yield served


def ask(store: HttpStore, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(store.host, store.port, timeout=10)
    try:
        connection.request(method, path, body)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def test_a_scope_is_emptied_when_all_its_members_have_connected(store: HttpStore) -> None:
    ask(store, "PUT", "/global/0", b"x")
    ask(store, "PUT", "/local_here/0", b"y")
    ask(store, "DELETE", "/global/0")
    ask(store, "DELETE", "/global/0")
    assert ask(store, "GET", "/global/0")[0] == 200
    ask(store, "DELETE", "/global/1")
    assert ask(store, "GET", "/global/0")[0] == 404
    assert ask(store, "GET", "/local_here/0")[0] == 200


def test_a_key_of_another_scope_is_deleted_alone(store: HttpStore) -> None:
    for key in ("a", "b"):
        ask(store, "PUT", f"/mine/{key}", b"x")
    ask(store, "DELETE", "/mine/a")
    assert [ask(store, "GET", f"/mine/{key}")[0] for key in ("a", "b")] == [404, 200]


def test_values_that_are_too_long_are_refused(store: HttpStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_store, "_LONGEST_VALUE", 8)
    monkeypatch.setattr(http_store, "_MOST_BYTES", 10)
    assert ask(store, "PUT", "/global/0", b"x" * 9)[0] == 400
    assert ask(store, "PUT", "/global/0", b"x" * 8)[0] == 200
    assert ask(store, "PUT", "/global/1", b"x" * 8)[0] == 400
