"""Extra steps of `run` under launchers that restart all processes after a failure or a change of hosts."""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
from collections.abc import Callable, Iterator

from ..agreement.connections import Connections
from ..checkpoint import FileSystem
from ..collectives.on_all_ranks import on_all_ranks
from ..errors import CheckpointError, HorovodInternalError
from ..launch import ELASTIC_DIR
from ..lifecycle import init, shutdown
from ..world.context import current
from .commits import Commits, InMemory
from .folder import folder_of_commits, make_private, remove_abandoned
from .state import State, attach, detach

__all__ = ("restarting",)

_numbers = itertools.count()
"""Numbers the `run`s of a program, since each has its own commits."""
_lifelines = itertools.count()
"""Numbers the lifelines, since each needs a new name under which its ranks meet."""


@contextlib.contextmanager
def restarting(state: State) -> Iterator[Callable[[], None]]:
    """Resume from the newest commit, write the commits of the `with` block, and yield a function to rejoin the world.

    Collective. Raises TypeError when a value of `state` cannot be written, CheckpointError when the folder cannot be
    used or the commit does not fit. All errors are raised on every rank.
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
    on_all_ranks(lambda: make_private(folder, env), CheckpointError)
    return Commits(folder, first_of_node, FileSystem() if env.get(ELASTIC_DIR) else InMemory())


class _Lifeline:
    """Idle connections between all ranks. If they close, a process has ended; otherwise a failure has another cause."""

    def __init__(self) -> None:
        self._connect()

    def rejoin(self) -> None:
        """Leave the world, and join it again with the same processes. Collective.

        Raises HorovodInternalError when one of them has ended. The launcher restarts all processes when it notices
        that, or when this process ends.
        """
        arguments = current().arguments
        shutdown()
        try:
            self._connections.allgather_messages(b"here")
        except HorovodInternalError as error:
            raise HorovodInternalError(
                "A process has ended, so this one must end, too. torchrun then restarts all of them, if --max-restarts "
                "allows it, and they resume from the last commit."
            ) from error
        self.close()
        init(**arguments)
        self._connect()

    def close(self) -> None:
        """Close the connections. Local."""
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
