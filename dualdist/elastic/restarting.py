"""What `run` does more when the launcher answers a failure, or new hosts, by starting all processes anew."""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
from collections.abc import Callable, Iterator

from ..agreement.connections import Connections
from ..checkpoint.ranks import on_all_ranks
from ..checkpoint.storage.filesystem import FileSystem
from ..errors import HorovodInternalError
from ..launch import ELASTIC_DIR
from ..lifecycle import init, shutdown
from ..world.context import current
from .commits import Commits, InMemory
from .folder import folder_of_commits, make_private, remove_abandoned
from .state import State, attach, detach

__all__ = ("restarting",)

_numbers = itertools.count()
"""Every `run` of a program has commits of its own."""
_lifelines = itertools.count()
"""Ranks find each other under a name that no earlier lifeline in this world had."""


@contextlib.contextmanager
def restarting(state: State) -> Iterator[Callable[[], None]]:
    """Go on from the newest commit, write those of the body, and give it a way to join the world anew. Collective.

    Raises TypeError when a value of `state` cannot be written, CheckpointError when the folder cannot be used or the
    commit does not fit. All on every rank.
    """
    former = attach(state, _open_commits(next(_numbers)))
    lifeline = _Lifeline()
    try:
        yield lifeline.rejoin
    finally:
        lifeline.close()
        detach(state, former)


def _open_commits(number: int) -> Commits:
    env = os.environ
    folder = folder_of_commits(env, sys.argv, number)
    first_of_node = not current().launch.local_rank
    if first_of_node:
        remove_abandoned()
    on_all_ranks(lambda: make_private(folder, env))
    return Commits(folder, first_of_node, FileSystem() if env.get(ELASTIC_DIR) else InMemory())


class _Lifeline:
    """Connections that carry nothing: they end when a process does, which a failed collective alone does not tell."""

    def __init__(self) -> None:
        self._connect()

    def rejoin(self) -> None:
        """Leave the world and join it anew with those who were in it. Collective.

        Raises HorovodInternalError when one of them has ended: the launcher, which has noticed or notices by the end of
        this process, starts everyone anew.
        """
        arguments = current().arguments
        shutdown()
        try:
            self._connections.allgather_messages(b"here")
        except HorovodInternalError as error:
            raise HorovodInternalError(
                "A process has ended, and this one must end, too: torchrun starts all of them anew, if --max-restarts "
                "allows it, and they go on from the last commit."
            ) from error
        self.close()
        init(**arguments)
        self._connect()

    def close(self) -> None:
        """Give the connections back. Local."""
        self._connections.close()

    def _connect(self) -> None:
        context = current()
        backend = context.backend
        self._connections = Connections(
            backend.store,
            f"lifeline-{next(_lifelines)}",
            range(backend.size),
            backend.rank,
            backend.address,
            context.settings.stall_timeout_seconds,
        )
