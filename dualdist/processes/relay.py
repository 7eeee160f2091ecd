"""The launcher's end of an agent that srun, mpirun or pbsdsh starts on another host, instead of ssh.

    python relay.py ADDRESS PATTERN env|file COMMAND...

These programs pass on standard input and output late, line by line, or not at all. Therefore the agent connects back:
this program listens on ADDRESS, starts COMMAND, which starts _AGENT on the host, and copies between the agent's
connection and its own standard input and output. The agent finds address, port and a random token in the environment
variable DUALDIST_AGENT, or in a file that only this user can read, if COMMAND passes on no environment.

This file imports the standard library alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading

VARIABLE, FILE = "env", "file"
"""How the agent learns where to connect."""
_NAME = "DUALDIST_AGENT"
_AGENT = (
    "import sys;del sys.path[0];import os,re,socket;"
    "e=os.environ;w=e.get('DUALDIST_AGENT') or open(sys.argv[2]).read();h,p,t=w.split();"
    "[e.pop(n) for n in list(e) if not re.fullmatch(sys.argv[1],n)];"
    "s=socket.create_connection((h,int(p)),30);s.settimeout(None);s.sendall(t.encode());"
    "os.dup2(s.fileno(),0);os.dup2(s.fileno(),1);s.close();"
    "i=sys.stdin.buffer;exec(i.read(int(i.readline())))"
)
"""Connects to the relay and runs the agent that it receives. It imports nothing from the current folder, and keeps only
the variables of the host (sys.argv[1]): the launcher sends the others, and srun and mpirun describe a world of one."""
_KEEP_ALIVE = ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 3))
"""As with ssh, a host that does not answer for half a minute is lost (seconds, seconds, number)."""
_PR_SET_PDEATHSIG = 1
_TOKEN = 32
_CHUNK = 1 << 18
_POLL_SECONDS, _TOKEN_SECONDS = 0.1, 5.0
_LAST_SECONDS = 5.0
"""How long COMMAND may take to end after the agent."""


def main(address: str, pattern: str, way: str, *command: str) -> int:
    """Start `command` and relay until the agent has ended; return the exit code of `command` if it fails before."""
    token = secrets.token_hex(_TOKEN // 2)
    with socket.create_server((address, 0)) as server, contextlib.ExitStack() as stack:
        place = f"{address} {server.getsockname()[1]} {token}"
        agent = [sys.executable, "-E", "-s", "-S", "-c", _AGENT, pattern]
        if way == FILE:
            # All hosts share this folder.
            file = stack.enter_context(tempfile.NamedTemporaryFile("w", prefix=".dualdist-", dir=os.getcwd()))
            file.write(place)
            file.flush()
            agent.append(file.name)
        starter = subprocess.Popen(
            [*command, *agent],
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr,
            env={**os.environ, **({_NAME: place} if way == VARIABLE else {})},
            preexec_fn=lambda: ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM),
        )
        connection = _accept(server, token, starter)
        if connection is None:
            return starter.wait() or 1
        stack.close()
        _relay(connection)
    with contextlib.suppress(subprocess.TimeoutExpired):
        starter.wait(_LAST_SECONDS)
    starter.terminate()
    return 0


def _accept(server: socket.socket, token: str, starter: subprocess.Popen[bytes]) -> socket.socket | None:
    """Return the connection of the agent, None if `starter` ends without one."""
    server.settimeout(_POLL_SECONDS)
    while starter.poll() is None:
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            connection = stack.enter_context(server.accept()[0])
            connection.settimeout(_TOKEN_SECONDS)
            if secrets.compare_digest(connection.recv(_TOKEN, socket.MSG_WAITALL), token.encode()):
                connection.settimeout(None)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                for option, value in _KEEP_ALIVE:
                    connection.setsockopt(socket.IPPROTO_TCP, option, value)
                stack.pop_all()  # so that it stays open
                return connection
    return None


def _relay(connection: socket.socket) -> None:
    """Copy in both directions until the agent closes the connection."""

    def send() -> None:
        with contextlib.suppress(OSError):
            while data := os.read(0, _CHUNK):
                connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)

    threading.Thread(target=send, daemon=True).start()
    with contextlib.suppress(OSError), open(1, "wb") as output:
        while data := connection.recv(_CHUNK):
            output.write(data)
            output.flush()


if __name__ == "__main__":
    code = main(*sys.argv[1:])
    sys.stderr.flush()
    os._exit(code)
