"""What backends have of torch.distributed: the store that ranks share, their groups, and torch's default group.

On the CPU, members make a group of gloo or MPI without the other ranks. devices/groups.py has those that
torch.distributed makes.
"""

from __future__ import annotations

import contextlib
import functools
import secrets
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
import torch.distributed.nn.functional

from ...errors import ConfigurationError, HorovodInternalError, StallError
from .. import accelerator, extension, needed
from ..meeting import ADVICE, Board, Meeting, PublishedBoard, find_board, no_board
from ..meeting.links import INTERFACE, Address, Addresses, Listener, check_interfaces, find_addresses, interface_of
from ..meeting.server import SPARE_FILES, raise_file_limit
from ..process import CHECK_SECONDS, Patience
from ..types import TORCH_OP_NAMES, Launch
from . import needs_gpus
from .base import Exchange, Group, Work


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
    launch: Launch, env: Mapping[str, str], seconds: float, on_error: Callable[[str, bool], object] | None = None
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


# torch.distributed.nn.functional is imported here because its functions have the default group as the default value of
# a parameter. Imported later, they would keep the group, with its connections, when this rank leaves the world, and
# would use it in the next world.

_REDUCE_OPS: list[Any] = [name and getattr(dist.ReduceOp, name) for name in TORCH_OP_NAMES]
_CHECK_INTERVAL = timedelta(seconds=CHECK_SECONDS)


@contextlib.contextmanager
def wrapped() -> Iterator[None]:
    """Convert c10d's exceptions into those of this package."""
    try:
        yield
    except HorovodInternalError:
        raise
    except RuntimeError as error:
        text = str(error)
        if "aborted" in text and not dist.is_initialized():
            raise HorovodInternalError(
                "torch.distributed.destroy_process_group() has destroyed the groups of dualdist, too. Call "
                "hvd.shutdown() in its place."
            ) from error
        if "timed out" in text.lower() or "timeout" in text.lower():
            raise StallError(f"A collective did not finish in time: {text}") from error
        raise HorovodInternalError(text) from error


def world_group() -> Any:
    """Return torch's group of the whole world, None if torch.distributed does not run."""
    return dist.group.WORLD if dist.is_initialized() else None


# Which of torch's backends carries the tensors of which device.

_CPU = "gloo"
"""What carries tensors on the CPU beside a transport for accelerators."""
_MPI = "mpi4py"
"""Our backend over MPI: torch has one called mpi, which only a torch that was built with MPI can use."""
THROUGH_HOST = (_CPU, "mpi", _MPI)
"""They send memory of the host."""


def config_of(transport: str) -> dict[str, str]:
    """Return {type of device: torch's backend for it} for `transport`."""
    if needs_gpus(transport):
        return {"cpu": _CPU, str(accelerator.kind()): transport}
    return {"cpu": _MPI if transport == "mpi" else transport}


def adopted_config(group: Any = None) -> dict[str, str]:
    """Return what `config_of` does, for a process group of torch, by default that of all ranks. It has the CPU."""
    return {"cpu": _CPU, **dict(part.split(":", 1) for part in dist.get_backend_config(group).split(","))}


class _TorchWork(Work):
    def __init__(self, work: dist.Work, device: torch.device, patience: Patience) -> None:
        self._work = work
        self._device = device
        self._patience = patience

    def wait(self) -> None:
        with wrapped():
            if self._device.type != "cpu":
                self._work.wait()
                return
            while not self._ends_within(_CHECK_INTERVAL):
                self._patience.check()

    def _ends_within(self, limit: timedelta) -> bool:
        """Wait at most `limit`, and return whether the collective has succeeded. Raises its error."""
        try:
            self._work.wait(limit)
        except RuntimeError:
            if not self._work.is_completed():
                return False
            self._work.wait()  # its result, or its error
        return True

    def done(self) -> bool:
        return bool(self._work.is_completed()) or self._patience.has_lost_member()

    def wait_for(self, seconds: float) -> None:
        if self._device.type == "cpu":  # NCCL would abort the collective
            limit = timedelta(seconds=max(seconds, 0.001))  # for gloo, 0 means no limit
            with contextlib.suppress(RuntimeError):  # late or failed: `wait` raises it
                self._work.wait(limit)


class TorchGroup(Group):
    """A process group of gloo or MPI for tensors on the CPU, which torch.distributed does not know."""

    def __init__(self, ranks: Sequence[int], rank: int, process_group: Any) -> None:
        """process_group: None on a rank that is not a member."""
        super().__init__(ranks, rank)
        self._pg = process_group

    def wire_device(self, device: torch.device) -> torch.device:
        return torch.device("cpu")

    def _started(self, work: dist.Work, tensor: torch.Tensor) -> Work:
        return _TorchWork(work, tensor.device, Patience(self.has_lost_member))

    def allreduce_(self, tensor: torch.Tensor, op: int, tag: str = "") -> Work:
        options = dist.AllreduceOptions()
        options.reduceOp = _REDUCE_OPS[op]
        with wrapped():
            return self._started(self._pg.allreduce([tensor], options), tensor)

    def broadcast_(self, tensor: torch.Tensor, root: int) -> Work:
        return self._broadcast([tensor], root)

    def broadcast_all_(self, tensors: Iterable[torch.Tensor], root: int) -> Work:
        if getattr(self._pg, "broadcasts_lists", False):
            return self._broadcast(list(tensors), root)
        return super().broadcast_all_(tensors, root)

    def _broadcast(self, tensors: list[torch.Tensor], root: int) -> Work:
        options = dist.BroadcastOptions()
        options.rootRank = root
        with wrapped():
            return self._started(self._pg.broadcast(tensors, options), tensors[0])

    def allgather(self, output: torch.Tensor, tensor: torch.Tensor) -> Work:
        with wrapped():
            return self._started(self._pg._allgather_base(output, tensor), tensor)

    def alltoall(
        self, output: torch.Tensor, tensor: torch.Tensor, received: Sequence[int], sent: Sequence[int]
    ) -> Work:
        with wrapped():
            work = self._pg.alltoall_base(output, tensor, list(received), list(sent))
        return self._started(work, tensor)

    def set_timeout(self, timeout: timedelta) -> None:
        if self._pg is not None:
            set_group_timeout(self._pg, timeout)

    def close(self) -> None:
        pg, self._pg = self._pg, None
        if hasattr(pg, "shutdown"):  # before torch 2.7, gloo has none: the group ends with its last reference
            pg.shutdown()


def set_group_timeout(process_group: Any, timeout: timedelta) -> None:
    """Set the timeout of later collectives of a process group. Local."""
    # Older releases of torch have only the private functions, newer ones warn of them.
    setter = getattr(process_group, "set_timeout", None) or getattr(process_group, "_set_default_timeout", None)
    if setter is not None:
        setter(timeout)
    else:
        dist.distributed_c10d._set_pg_timeout(timeout, process_group)


# Process groups that their members make without the other ranks, and without torch.distributed's list of groups.
#
# torch.distributed.new_group names such a group after the number of groups that the process has made, or is in. The
# members of a group would use different names if these numbers differ.


def direct_group(
    kind: str, store: dist.Store, name: str, ranks: Sequence[int], rank: int, timeout: timedelta
) -> TorchGroup:
    """Return a group of some ranks. Collective over `ranks` alone.

    store: shared by the members. name: the same on all members, and used once.
    """
    place, own_store, size = list(ranks).index(rank), dist.PrefixStore(name, store), len(ranks)
    with wrapped():
        if kind == _CPU:
            return TorchGroup(ranks, rank, dist.ProcessGroupGloo(own_store, place, size, timeout))
        options = {"store": own_store, "group_id": name, "timeout": timeout}
        given = SimpleNamespace(**options, group_rank=place, group_size=size)
        return TorchGroup(ranks, rank, needed("mpi_transport").create(given))


_NAME_BYTES = 8


def connected(
    ranks: Sequence[int], exchange: Exchange, count: int, connect: Callable[[str, Sequence[int]], Group]
) -> tuple[str, list[Group]]:
    """Return a name of a new connection of `ranks`, and `count` groups over them. Collective over `ranks` alone.

    exchange: of the members. connect: connect(name, ranks) returns a group over `ranks`.
    """
    name = exchange(secrets.token_bytes(_NAME_BYTES))[0].hex()
    return name, [connect(f"{name}.{number}", ranks) for number in range(count)]


# Torch's default process group, which programs that call torch.distributed find in every world.
#
# Gloo connects all ranks at once. TORCH_GLOO_LAZY_INIT would save 1 ms with 2 ranks, and 5 ms with 8. But two ranks
# that connect while one of them leaves the world may wait for minutes, or abort (torch 2.15).


def gloo_interface(address: str, env: Mapping[str, str]) -> dict[str, str | None]:
    """Return the variables that make Gloo use the interface of `address`, except those that the user has set.

    By default, Gloo uses the address of the host's name, which other hosts may not reach (127.0.1.1 on Debian). NCCL
    finds the best connection between GPUs itself, so its variable is set only if the user chose an interface. Raises
    ConfigurationError if the user has chosen one for Gloo that this host does not have.
    """
    check_interfaces("GLOO_SOCKET_IFNAME", env)
    names = ["GLOO_SOCKET_IFNAME"] + ["NCCL_SOCKET_IFNAME"] * bool(env.get(INTERFACE))
    return {name: interface_of(address) for name in names if not env.get(name)}


class DefaultGroup:
    """The default group, if this world has made it."""

    def __init__(self) -> None:
        self._own: dist.ProcessGroup | None = None
        self._store: dist.Store | None = None

    def open(self, config: Mapping[str, str], store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        """Make the group, unless there is one. Collective. config: as for TorchGroups."""
        if not dist.is_initialized():
            place: Any = {"store": store, "rank": rank, "world_size": size}
            dist.init_process_group(config_text(config), **place, **self._options(timeout))
            self._own, self._store = dist.group.WORLD, store

    def _options(self, timeout: timedelta) -> dict[str, Any]:
        return {"timeout": timeout}

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeouts of the group's store, and of its later collectives. Local."""
        if self._store is not None:
            self._store.set_timeout(timeout)
            set_group_timeout(self._own, self._options(timeout)["timeout"])

    def abort(self) -> None:
        """Begin to end what is in progress on a device, also in groups that the program has made. Local."""

    def close(self) -> None:
        """Destroy all groups, unless the program has done it. Local. It waits for their collectives, or aborts them."""
        own, self._own, self._store = self._own, None, None
        if own is not None and dist.is_initialized() and own is dist.group.WORLD:
            self._destroy()

    def _destroy(self) -> None:
        dist.destroy_process_group()


def new_default_group(device: torch.device | None) -> DefaultGroup:
    """Return one that is not open yet. device: to which the transport is bound."""
    return DefaultGroup() if device is None else needed("device_groups").DefaultGroup(device)


# The limit of open files, which a large world needs to be higher than usual systems set it.

_GROUPS = 3
"""How many groups of Gloo connect all ranks: two of dualdist, and torch's default group."""


def allow_open_files(size: int) -> None:
    """Raise this process's limit of open files if a world of `size` ranks needs more. Local.

    While the world starts, rank 0 has one more for each rank. Raises ConfigurationError if the limit is too low.
    """
    needed, allowed = raise_file_limit((_GROUPS + 1) * size)
    if allowed < needed - SPARE_FILES:
        raise ConfigurationError(
            f"The hard limit of open files must be at least {needed} for {size} ranks, but is {allowed} instead. Raise "
            "it on this host (ulimit -Hn, LimitNOFILE of systemd, docker run --ulimit nofile)."
        )


# All groups of a world.


def config_text(config: Mapping[str, str]) -> str:
    """Return `config` as torch's argument `backend`."""
    return config["cpu"] if [*config] == ["cpu"] else ",".join(f"{kind}:{config[kind]}" for kind in sorted(config))


class TorchGroups:
    """The groups of one world."""

    def __init__(
        self,
        rank: int,
        config: Mapping[str, str],
        device: torch.device | None,
        nodes: Sequence[str],
        store: dist.Store,
        timeout: timedelta,
        env: Mapping[str, str],
    ) -> None:
        """config: which of torch's backends carries the tensors of which device. device: to which it is bound.

        nodes: the host of each rank. timeout: of collectives. env: with the settings.
        """
        self._rank, self._config, self._device, self._nodes = rank, config, device, nodes
        self._store, self._timeout, self._env = store, timeout, env
        self._groups: list[Group] = []

    def make(self, ranks: Sequence[int], count: int, exchange: Exchange, among_members: bool = False) -> list[Group]:
        """Return what `Backend.new_groups` does."""
        if self._rank in ranks:
            raise_file_limit(count * len(ranks))  # Gloo connects all members
        made = self._connected(ranks, count, exchange, among_members)
        self._groups += made
        return made

    def _connected(self, ranks: Sequence[int], count: int, exchange: Exchange, among_members: bool) -> list[Group]:
        if self._rank not in ranks:
            return [TorchGroup(ranks, self._rank, None) for _ in range(count)]
        if (share_host := extension("shared_memory")) is None:
            return connected(ranks, exchange, count, self._connect)[1]
        # Without torch's default group, and on one host also without connections.
        place, seconds = (self._rank, self._nodes), self._timeout.total_seconds()
        made: list[Group] = share_host(ranks, *place, exchange, seconds, count, self._connect, self._env)
        return made

    def _connect(self, name: str, ranks: Sequence[int]) -> Group:
        """Return a group over `ranks`, for tensors on the CPU. Collective over `ranks` alone."""
        place = ranks, self._rank, self._timeout
        return direct_group(self._config["cpu"], connect_again(self._store), name, *place)

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of later collectives. Local."""
        self._timeout = timeout
        for group in self._groups:
            group.set_timeout(timeout)

    def close(self) -> None:
        """Destroy the groups. Local."""
        for group in self._groups:
            group.close()

    def abandon(self) -> None:
        """In a forked process, close its copies of the sockets. Local."""
        for group in self._groups:
            group.abandon()


def new_torch_groups(rank: int, config: Mapping[str, str], device: torch.device | None, *others: Any) -> TorchGroups:
    """Return the groups of a world, none yet. The arguments are those of TorchGroups."""
    is_direct = [*config] == ["cpu"] and config["cpu"] in (_CPU, _MPI)
    kind = TorchGroups if is_direct else needed("device_groups").DeviceGroups
    return kind(rank, config, device, *others)
