"""One process of a launch that tries several engines in turn: pytest says which, and hears what became of it.

    LAUNCHER python -m tests.launchers.cells HOST:PORT KEY

Importing torch takes most of a launch. So every engine is tried in a fork of a process which has imported dualdist and
done nothing more: it has the environment that the launcher gave, and no engine has run in it. MPI alone can be
started only once in a launch, wherever.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import traceback
from multiprocessing.connection import Client
from typing import Any

__all__ = ("CELL_SECONDS", "serve", "use")

CELL_SECONDS = 20.0
"""Within this time an engine works, or refuses."""


def serve(address: str, key: str) -> None:
    """Try each (backend, transport) that pytest sends, until it closes the connection."""
    import dualdist

    assert not dualdist.is_initialized()
    host, _, port = address.rpartition(":")
    with Client((host, int(port)), authkey=key.encode()) as connection:
        while True:
            try:
                backend, transport = connection.recv()
            except EOFError:
                return
            connection.send(_try(backend, transport))


def use(backend: str | None, transport: str | None) -> dict[str, Any]:
    """Join the world, and return who this process is there, and a sum over all ranks."""
    import torch

    import dualdist

    dualdist.init(backend=backend, transport=transport)
    total = dualdist.allreduce(torch.tensor([10.0 ** dualdist.rank()]), op=dualdist.Sum).item()
    names = ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size")
    told = {name: getattr(dualdist, name)() for name in names}
    told |= {
        "runs": f"{dualdist.backend_name()}+{dualdist.transport_name()}",
        "launcher": dualdist.launcher_name(),
        "sum": int(total),
    }
    dualdist.shutdown()
    return told


def _try(backend: str | None, transport: str | None) -> dict[str, Any]:
    """Use an engine in a fork, and return what `use` returns, or how it failed."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        try:
            told = use(backend, transport)
        except Exception as error:
            traceback.print_exc()
            told = {"error": f"{type(error).__name__}: {error}"}
        with open(writer, "w") as pipe:
            json.dump(told, pipe)
        sys.exit(0)
    os.close(writer)
    told = _hear(reader, child)
    _, status = os.waitpid(child, 0)
    if status != 0:
        told["ended"] = os.waitstatus_to_exitcode(status)
    return told


def _hear(reader: int, child: int) -> dict[str, Any]:
    """Return what the fork says; end it when it says nothing in time, or does not end then."""
    with open(reader) as pipe:
        if not select.select([pipe], [], [], CELL_SECONDS)[0]:
            os.kill(child, signal.SIGKILL)
            return {"error": f"nothing within {CELL_SECONDS:.0f} s"}
        text = pipe.read()
    told: dict[str, Any] = json.loads(text) if text else {"error": "died"}
    handle = os.pidfd_open(child)
    if not select.select([handle], [], [], CELL_SECONDS)[0]:
        os.kill(child, signal.SIGKILL)
        told["error"] = f"did not end within {CELL_SECONDS:.0f} s"
    os.close(handle)
    return told


def main() -> None:
    words = sys.argv[1:]
    if words[0] == "spawn":
        import dualdist

        dualdist.spawn(serve, args=tuple(words[2:]), nprocs=int(words[1]))
    else:
        serve(words[0], words[1])


if __name__ == "__main__":
    main()
