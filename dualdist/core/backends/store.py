"""c10d's Store, which the ranks of a world share when they have met. Rank 0 serves one for each world.

It listens only on the one address that the other ranks use.
"""

from __future__ import annotations

import contextlib
import functools
import socket
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, NamedTuple, cast

import torch.distributed as dist

from ...errors import ConfigurationError
from ..extensions import extension
from ..meeting.addresses import Addresses, find_addresses
from ..meeting.boards import ADVICE, Board, PublishedBoard, find_board, no_board
from ..meeting.links import Address, Listener
from ..meeting.member import Meeting
from ..types import Launch


class StoreBoard(PublishedBoard):
    """A store that the ranks share before they meet: that of torchrun's agent, or of a process group."""

    _KEY = "dualdist/rank 0"

    def __init__(self, launch: Launch, env: Mapping[str, str], store: dist.Store) -> None:
        super().__init__(launch, env)
        self._store = store
        if launch.restarts:
            # torch/distributed/elastic/rendezvous/dynamic_rendezvous.py, next_rendezvous
            self.advice = (
                f"{ADVICE} If hosts join and leave, set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for every torchrun: "
                "without it, its older processes may get the address of an earlier round's store."
            )

    def write(self, text: str) -> None:
        self._store.set(self._KEY, text)

    def read(self, seconds: float) -> str | None:
        # A timeout of 0 has no end. FileStore has no class of its own for the error.
        with contextlib.suppress(RuntimeError):
            self._store.wait([self._KEY], timedelta(seconds=max(1e-3, seconds)))
            return self._store.get(self._KEY).decode()
        return None

    def clear(self) -> None:
        with contextlib.suppress(RuntimeError):
            self._store.delete_key(self._KEY)


def meet(
    launch: Launch,
    env: Mapping[str, str],
    seconds: float,
    on_error: Callable[[str, bool], object] | None = None,
) -> Meeting:
    """Return the meeting of all launched processes. seconds: to wait for another process. on_error: see Meeting."""
    return Meeting(_board(launch, env, seconds), launch.rank, launch.size, seconds, on_error)


def _board(launch: Launch, env: Mapping[str, str], seconds: float) -> Board:
    if launch.init_method != "env://" or env.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return _launchers_board(launch, env)
    try:
        store = _agents_store(env["MASTER_ADDR"], int(env["MASTER_PORT"]), timedelta(seconds=seconds))
    except RuntimeError as error:
        problem = str(error).partition("\n")[0]
        raise ConfigurationError(
            f"torchrun's store must answer at MASTER_ADDR:MASTER_PORT={env['MASTER_ADDR']}:{env['MASTER_PORT']}, but "
            f"does not: {problem}. Look at torchrun's output."
        ) from error
    return StoreBoard(launch, env, store)


def _launchers_board(launch: Launch, env: Mapping[str, str]) -> Board:
    """Return where the ranks meet. If the launcher gives no address, they first agree on one through PMI-1 or PMIx."""
    board = find_board(launch, env)
    if board is not None:
        return board
    if launch.starts_mpi and (find := extension("process_manager")) is not None and (board := find(launch, env)):
        return cast(Board, board)
    how = "install mpi4py (pip install mpi4py) and use a launcher that starts MPI (mpirun, or srun --mpi=pmix)"
    raise no_board(launch, how)


@functools.cache
def _agents_store(host: str, port: int, timeout: timedelta) -> dist.TCPStore:
    return dist.TCPStore(host, port, is_master=False, timeout=timeout)


class SharedStore(NamedTuple):
    """A store that all processes of a world share, and the addresses of these processes."""

    store: dist.Store
    addresses: Addresses
    listener: Listener
    """Where this process takes the calls of the others, with the addresses of all."""
    messages: tuple[Any, ...]
    """Of all ranks, in rank order."""


_served: list[dist.TCPStore | None] = []
"""The last store that this process has served. Other ranks may use it when this one has left the world."""


def open_store(meeting: Meeting, env: Mapping[str, str], seconds: float, message: Any = None) -> SharedStore:
    """Return a new store that all ranks of the meeting share, and where each one takes calls. Collective.

    seconds: the timeout of the store. message: for all other ranks, in types of JSON.
    """
    timeout = timedelta(seconds=seconds)
    with contextlib.ExitStack() as undo:
        served: list[dist.TCPStore | None] = []
        listeners: list[Listener] = []

        def listen(address: str) -> Any:
            undo.close()
            served[:] = [_serve(address, timeout) if meeting.rank == 0 else None]
            listeners[:] = [undo.enter_context(contextlib.closing(Listener(address)))]
            return [served[0] and served[0].port, listeners[0].address, message]

        addresses = find_addresses(meeting.rank, meeting.gather, env, listen)
        ports, places, messages = zip(*addresses.offers, strict=True)
        if meeting.rank == 0:
            _served[:] = served  # all ranks have left the world before
        listeners[0].ranks = [Address(*place) for place in places]
        store = served[0] or dist.TCPStore(addresses.first, ports[0], is_master=False, timeout=timeout)
        undo.pop_all()
    return SharedStore(store, addresses, listeners[0], messages)


def connect_again(store: Any) -> dist.TCPStore:
    """Return another connection to the server of `store`. While a thread waits in one, others cannot use it."""
    return dist.TCPStore(store.host, store.port, is_master=False, timeout=store.timeout)


def _serve(host: str, timeout: timedelta) -> dist.TCPStore:
    # Before torch 2.7, which added this method, the faster server, libuv's, takes no listening socket.
    libuv = hasattr(dist.TCPStore, "clone")
    server = socket.create_server((host, 0), backlog=4096)
    port = server.getsockname()[1]
    return dist.TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timeout,
        master_listen_fd=server.detach(),
        use_libuv=libuv,
    )
