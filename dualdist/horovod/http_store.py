"""The HTTP server at which Horovod's Gloo controllers exchange their addresses, as horovodrun's does.

Horovod's client (horovod/common/gloo/http_store.cc) sends no secret, so the server is open to everyone who reaches its
address, as horovodrun's is. It only stores short values, and none of them is interpreted.
"""

from __future__ import annotations

import threading
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from ..core.meeting import PublishedBoard
from ..core.types import Launch, World

_LONGEST_VALUE, _MOST_BYTES = 1 << 20, 64 << 20
"""Bytes of one value, and of all values together."""
_REQUEST_SECONDS = 30.0


class HttpStore(ThreadingHTTPServer):
    """Serves PUT, GET and DELETE of /SCOPE/KEY until it is closed. A context manager.

    scopes: the number of members of each of Horovod's own scopes. Each member deletes its rank when it has connected to
    the others; then the scope is emptied, and the same processes can start Horovod again
    (horovod/runner/http/http_server.py:RendezvousHandler.do_DELETE).
    """

    request_queue_size = 1024

    def __init__(self, host: str, scopes: Mapping[str, int]) -> None:
        super().__init__((host, 0), Handler)
        self.host, self.port = host, int(self.server_address[1])
        self.scopes = scopes
        self.values: dict[tuple[str, str], bytes] = {}
        self.finished: dict[str, set[str]] = {scope: set() for scope in scopes}
        self.lock = threading.Lock()
        self._thread = threading.Thread(target=self.serve_forever, args=(0.05,), name="dualdist-http", daemon=True)
        self._thread.start()

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that closes its connection is no error of the server."""

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop serving."""
        self.shutdown()
        self._thread.join()
        self.server_close()


class Handler(BaseHTTPRequestHandler):
    server: HttpStore
    timeout = _REQUEST_SECONDS

    def do_GET(self) -> None:
        with self.server.lock:
            value = self.server.values.get(self._name())
        self._answer(HTTPStatus.NOT_FOUND if value is None else HTTPStatus.OK, value or b"")

    def do_PUT(self) -> None:
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > _LONGEST_VALUE:
            self._answer(HTTPStatus.BAD_REQUEST)
            return
        value = self.rfile.read(int(length))
        with self.server.lock:
            has_room = len(value) + sum(map(len, self.server.values.values())) <= _MOST_BYTES
            if kept := len(value) == int(length) and has_room:
                self.server.values[self._name()] = value
        self._answer(HTTPStatus.OK if kept else HTTPStatus.BAD_REQUEST)

    def do_DELETE(self) -> None:
        """Delete a value, or record that the member of one of Horovod's scopes has finished."""
        server, (scope, key) = self.server, self._name()
        with server.lock:
            if scope not in server.scopes:
                server.values.pop((scope, key), None)
            else:
                server.finished[scope].add(key)
                if len(server.finished[scope]) == server.scopes[scope]:
                    server.finished[scope].clear()
                    server.values = {name: value for name, value in server.values.items() if name[0] != scope}
        self._answer(HTTPStatus.OK)

    def _name(self) -> tuple[str, str]:
        """Return (scope, key) of the path /SCOPE/KEY."""
        scope, _, key = self.path.removeprefix("/").partition("/")
        return scope, key

    def _answer(self, status: HTTPStatus, body: bytes = b"") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Do not print every request."""


def horovods_scopes(nodes: Sequence[str], worlds: Sequence[World]) -> dict[str, int]:
    """Return Horovod's own scopes and their numbers of members. nodes, worlds: of each rank."""
    local = {f"local_{node}": count for node, count in Counter(nodes).items()}
    cross = {f"cross_{world.local_rank}": world.cross_size for world in worlds}
    return {"global": len(nodes), **local, **cross}


# The same server of horovodrun as a board, where ranks find the server of their meeting.

_HTTP_SECONDS = 60.0


class HttpBoard(PublishedBoard):
    """horovodrun's server (horovod/runner/http/http_server.py)."""

    def __init__(self, launch: Launch, env: Mapping[str, str], address: str) -> None:
        super().__init__(launch, env)
        self._url = f"http://{address}/dualdist/rank0"
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def write(self, text: str) -> None:
        request = urllib.request.Request(self._url, text.encode(), method="PUT")
        self._opener.open(request, timeout=_HTTP_SECONDS).close()

    def read(self, seconds: float) -> str | None:
        try:
            with self._opener.open(self._url, timeout=_HTTP_SECONDS) as answer:
                return str(answer.read().decode())
        except urllib.error.HTTPError as error:
            if error.code == 404:  # not set yet
                return None
            raise

    def clear(self) -> None:
        self.write("")
