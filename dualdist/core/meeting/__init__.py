"""How the ranks of a job meet before any backend runs, and who is missing. Imports no torch.

A meeting has one server (server.py), in rank 0 or in the launcher. A board (boards.py) is where
the ranks find its address, and `find_board` chooses the board of a launcher. The store of torchrun's agent is a board,
too: it needs torch, so it is in core/backends/store.py. Each rank connects to the server (member.py), and the ranks
gather texts through it. While they start, the server reports a rank that ends to all others. A server in rank 0 closes
when the `init()` of rank 0 has ended.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from ...errors import ConfigurationError
from ..extensions import extension
from ..launch import is_one_host
from ..launch.environment import RENDEZVOUS
from ..types import Launch
from .boards import Board, LaunchersBoard, given_board, one_host_board


def find_board(launch: Launch, env: Mapping[str, str], *, may_start_mpi: bool = True) -> Board | None:
    """Return where the ranks of `launch` find the server of their meeting, None if there is no such place.

    Not for ranks that share a store of torch already, such as torchrun's: see core/backends/store.py.
    """
    source = launch.sources.get("rank")
    is_alone = launch.size == 1 and launch.init_method == "env://" and not env.get("MASTER_ADDR")
    if launch.init_method is not None and not is_alone:
        return given_board(launch, env)
    if source == "DUALDIST_RANK" and env.get(RENDEZVOUS):
        return LaunchersBoard(env)
    horovods = source == "HOROVOD_RANK" and env.get("HOROVOD_GLOO_RENDEZVOUS_ADDR")
    if horovods and (store := extension("horovods_store")) is not None:
        address = f"{horovods}:{env['HOROVOD_GLOO_RENDEZVOUS_PORT']}"
        return cast(Board, store.HttpBoard(launch, env, address))
    if launch.starts_mpi and (mpi := extension("mpi")) is not None:
        # MPI takes long to start, and can start once only.
        wants_mpi = mpi.has_started() or (may_start_mpi and not is_one_host(launch))
        if wants_mpi and mpi.world_size() == launch.size:
            return cast(Board, mpi.MpiBoard(launch, env))
    if is_one_host(launch):
        return one_host_board(launch, env)
    slurm_board = extension("slurm_board")
    return None if slurm_board is None else cast("Board | None", slurm_board(launch.rank, env))


def no_board(launch: Launch, otherwise: str) -> ConfigurationError:
    """Return the error of ranks that have no board. otherwise: what else to do than to give an address."""
    return ConfigurationError(
        f"World size is {launch.describe('size')}, but no address of rank 0 is known, and nothing shows that all "
        f"processes are on one node. Set MASTER_ADDR and MASTER_PORT for every process, or {otherwise}."
    )
