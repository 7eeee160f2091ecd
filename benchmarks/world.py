"""The command line of the programs that measure in a world which a launcher has started, and what they start."""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist

import dualdist as hvd

__all__ = ("command_line", "join_world", "start_gloo")


def command_line(purpose: str, *, rounds: int) -> argparse.ArgumentParser:
    """Return a parser with the options that all these programs have.

    purpose: for `--help`. rounds: how many, if the user does not say it.
    """
    parser = argparse.ArgumentParser(description=purpose)
    parser.add_argument("--backend", choices=("torch", "horovod"), default="torch")
    parser.add_argument("--transport", help="such as gloo or mpi")
    parser.add_argument("--rounds", type=int, default=rounds, help="turns of each (%(default)s)")
    return parser


def join_world(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Join the world that the command line asks for, with one thread for torch's kernels. Return its options."""
    settings = parser.parse_args()
    torch.set_num_threads(1)
    hvd.init(backend=settings.backend, transport=settings.transport)
    return settings


def start_gloo() -> dist.ProcessGroup:
    """Return a gloo group of all ranks, beside any groups that exist already."""
    if dist.is_initialized():
        group = dist.new_group(backend="gloo")
        assert isinstance(group, dist.ProcessGroup)
        return group
    store = None
    if hvd.rank() == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = hvd.broadcast_object(store and store.port)
    store = store or dist.TCPStore("127.0.0.1", port)
    dist.init_process_group("gloo", store=store, rank=hvd.rank(), world_size=hvd.size())
    assert dist.group.WORLD is not None
    return dist.group.WORLD
