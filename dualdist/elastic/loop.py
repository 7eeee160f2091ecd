"""The loop around an elastic training function: share the state, train, and start again after a failure."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import os
import re
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

from ..checkpoint.for_elastic import Commits
from ..core import checks
from ..core.agreement.connections import Connections
from ..core.collectives.objects import on_all_ranks
from ..core.launch import ELASTIC_DIR
from ..core.lifecycle import init, rank, shutdown
from ..core.meeting import LauncherProcess, find_launcher_process
from ..core.world import current
from ..errors import CheckpointError, ConfigurationError, HorovodInternalError, HostsUpdatedInterrupt, logger
from .state import ObjectState, State, commits_made

# What `run` does in addition under launchers that end all processes after a failure and start new ones.


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
    env = os.environ
    first_of_node = not current().launch.local_rank
    folder = folder_of_commits(env, sys.argv, next(_numbers))
    if first_of_node:
        remove_abandoned()
    on_all_ranks(lambda: make_private(folder, env), CheckpointError)
    # In the temporary folder, the files must survive processes, not the machine.
    commits = Commits(folder, first_of_node, durable=bool(env.get(ELASTIC_DIR)))
    outer = state._commits if isinstance(state, ObjectState) else None  # of a `run` inside which this one is
    if isinstance(state, ObjectState):
        state._resume(commits)
    elif rank() == 0:
        logger.warning(
            "A %s is not saved outside its processes. When torchrun restarts them, training starts from the beginning. "
            "Use an ObjectState or a TorchState.",
            type(state).__name__,
        )
    with _lifeline() as rejoin:
        try:
            yield rejoin
        finally:
            if isinstance(state, ObjectState):
                state._commits = outer


@contextlib.contextmanager
def _lifeline() -> Iterator[Callable[[], None]]:
    """Connect all ranks, and yield a function to leave the world, and join it again with the same processes.

    The connections are idle. If they close, a process has ended; otherwise a failure has another cause. Then the
    function raises HorovodInternalError, and the launcher restarts all processes. Both are collective.
    """

    def connected() -> Connections:
        backend, timeout = current().backend, current().settings.stall_timeout_seconds
        name = f"lifeline-{next(_lifelines)}"
        return Connections(backend.listener, name, range(backend.size), backend.rank, timeout)

    connections = connected()

    def check() -> None:
        try:
            connections.allgather_messages(b"here")
        except HorovodInternalError as error:
            raise HorovodInternalError(
                "A process has ended, so this one must end, too. torchrun then restarts all of them, if --max-restarts "
                "allows it, and they resume from the last commit."
            ) from error
        connections.close()

    def rejoin() -> None:
        nonlocal connections
        _rejoin(check)
        connections = connected()

    try:
        yield rejoin
    finally:
        connections.close()


# The folder of a job's commits on this node.

_RUN_ID = "TORCHELASTIC_RUN_ID"


def folder_of_commits(env: Mapping[str, str], program: Sequence[str], number: int) -> Path:
    """Return the folder for the commits of the program's `number`-th `elastic.run`.

    A folder that the user sets is used as it is, so that a job which is started again continues from it. Otherwise the
    folder belongs to the torchrun process of this node, because only that lives as long as the job. The run id alone is
    not enough: jobs reuse it, and the default "none" is the same for all.
    """
    if env.get(ELASTIC_DIR):
        return Path(env[ELASTIC_DIR]) / f"run-{number}"
    torchrun = find_launcher_process(_RUN_ID)
    agent = f"{_prefix()}{torchrun.pid}-{torchrun.start_time}"
    name = hashlib.sha256("\0".join([env[_RUN_ID], *program]).encode()).hexdigest()[:12]
    return Path(tempfile.gettempdir()) / agent / f"{name}-{number}"


def make_private(folder: Path, env: Mapping[str, str]) -> None:
    """Make the folder. Under the temporary folder, only this user may access it.

    Raises CheckpointError when its parent is not a folder of this user.
    """
    if not env.get(ELASTIC_DIR):
        folder.parent.mkdir(mode=0o700, exist_ok=True)
        status = folder.parent.lstat()
        if status.st_uid != os.getuid() or not stat.S_ISDIR(status.st_mode):
            raise CheckpointError(
                f"{folder.parent} must be a folder of this user, but is not. Remove it, or set {ELASTIC_DIR}."
            )
    folder.mkdir(parents=True, exist_ok=True)


def remove_abandoned() -> None:
    """Remove the folders under the temporary folder whose torchrun process has ended."""
    pattern = re.compile(re.escape(_prefix()) + r"(\d+)-(\d+)")
    for folder in Path(tempfile.gettempdir()).iterdir():
        of_agent = pattern.fullmatch(folder.name)
        if of_agent is not None and not LauncherProcess(int(of_agent[1]), int(of_agent[2])).is_alive():
            shutil.rmtree(folder, ignore_errors=True)


def _prefix() -> str:
    """Return the start of the folders' names. It identifies boot and container, in which process ids are unique."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    place = hashlib.sha256((boot + os.readlink("/proc/self/ns/pid")).encode()).hexdigest()[:12]
    return f"dualdist-elastic-{os.getuid()}-{place}-"


_MOST_FAILURES = 10
"""After this many failures in a row without a commit, `run` raises the error. (horovodrun has --reset-limit.)"""

T = TypeVar("T")


def run(func: Callable[..., T]) -> Callable[..., T]:
    """Decorate a training function `func(state, ...)` so that it survives failed collectives and changes of hosts.

    The wrapper shares the state and calls `func`. When a collective raises HorovodInternalError, every rank returns
    to the state's last commit; on HostsUpdatedInterrupt every rank keeps its current state. Then every rank leaves the
    world, joins it again with the arguments of the first `init()`, calls the reset callbacks, and calls `func` again.
    If process sets were added after `init()`, add them again in a reset callback. Any other exception ends the
    process, and so does the tenth HorovodInternalError in a row without a commit in between.

    Collective, after `init()`, with a `State` as first argument. dualdist.elastic lists what it recovers from.

    Raises ConfigurationError if the launcher can change the hosts of the job, but the backend cannot join a new world.
    """

    checks.function("func", func)

    @functools.wraps(func)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> T:
        _check_state(state)
        rejoining = restarting(state) if current().launch.restarts else contextlib.nullcontext(_rejoin)
        with rejoining as rejoin:
            return run_fn(func, rejoin)(state, *args, **kwargs)

    return wrapper


def run_fn(func: Callable[..., T], reset: Callable[[], None]) -> Callable[..., T]:
    """Do what `run` does, but call `reset` to join the world again (horovod/common/elastic.py, run_fn). Collective."""

    checks.function("func", func)
    checks.function("reset", reset)

    @functools.wraps(func)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> T:
        _check_state(state)
        _check_backend()
        failures, made = 0, commits_made(state)
        backend = current().backend
        if isinstance(backend, ChangesHosts):
            backend.add_host_listener(state)
        skip_sync = False
        try:
            while True:
                try:
                    if not skip_sync:
                        state.sync()
                    return func(state, *args, **kwargs)
                except HorovodInternalError as error:
                    before, made = made, commits_made(state)
                    failures = failures + 1 if made is not None and made == before else 1
                    if failures == _MOST_FAILURES:
                        raise HorovodInternalError(
                            f"Training has failed {failures} times in a row without a commit, the last time: {error}"
                        ) from error
                    logger.warning("Returning to the last commit, because a collective has failed: %s", error)
                    state.restore()
                    skip_sync = False
                except HostsUpdatedInterrupt as interrupt:
                    skip_sync = interrupt.skip_sync
                reset()
                state.on_reset()
        finally:
            if isinstance(backend, ChangesHosts):
                backend.remove_host_listener(state)

    return wrapper


@runtime_checkable
class ChangesHosts(Protocol):
    """A backend that can join another world when the launcher has changed the hosts of the job (`Launch.elastic`)."""

    def add_host_listener(self, listener: Any) -> None:
        """Call `listener.on_hosts_updated(timestamp, change)` whenever the launcher changes the hosts of the job.

        change: 1 for removed, 2 for added, 3 for both. A listener stays registered when the world is left and joined
        again.
        """

    def remove_host_listener(self, listener: Any) -> None:
        """Undo `add_host_listener`."""


def _check_state(state: Any) -> None:
    if not all(callable(getattr(state, name, None)) for name in ("sync", "restore", "on_reset")):
        raise TypeError(f"`state` must be a TorchState or another State, but is a {type(state).__name__} instead.")


def _check_backend() -> None:
    launch, backend = current().launch, current().backend
    if launch.elastic and not isinstance(backend, ChangesHosts):
        raise ConfigurationError(
            f"Elastic training under {launch.launcher} must run on backend 'horovod', but runs on {backend.name!r} "
            'instead, which cannot form a new world there. Call init(backend="horovod") or set '
            "DUALDIST_BACKEND=horovod, or start with torchrun."
        )


def _rejoin(check: Callable[[], object] = lambda: None) -> None:
    arguments = current().arguments
    shutdown()
    check()
    init(**arguments)
