"""The errors that dualdist raises.

    Exception
    ├─ ValueError
    │  └─ ConfigurationError           an option, the environment or the installation is wrong
    │     ├─ BackendUnavailableError   the backend is known but cannot run here
    │     └─ WorldMismatchError        the launcher and the backend disagree on the world
    └─ RuntimeError
       ├─ ProcessEndedError            a process of dualdist.spawn died, or its exception cannot be sent
       ├─ CheckpointError              a checkpoint could not be saved or restored, or does not fit
       │  └─ DamagedCheckpointError    a file differs from what was written, or holds what must not be loaded
       ├─ ReplicaMismatchError         the ranks train different models: see check_replicas
       ├─ HostsUpdatedInterrupt        not an error: the hosts of an elastic job have changed
       └─ HorovodInternalError         a collective failed; elastic training recovers from it
          ├─ NotInitializedError       also a ValueError, because Horovod's rank() and size() raise ValueError
          ├─ CollectiveMismatchError   the ranks called different collectives
          └─ StallError                a rank did not call the collective in time

Errors that a script may catch have the same classes as in Horovod: `HorovodInternalError`, and the built-in
`ValueError` for arguments that are wrong on this rank (horovod/common/exceptions.py, horovod/torch/adapter_v2.cc:188).
"""

from __future__ import annotations

import logging

__all__ = (
    "BackendUnavailableError",
    "CheckpointError",
    "CollectiveMismatchError",
    "ConfigurationError",
    "DamagedCheckpointError",
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "NotInitializedError",
    "ProcessEndedError",
    "ReplicaMismatchError",
    "StallError",
    "WorldMismatchError",
)

logger = logging.getLogger("dualdist")
"""Reports what is no error."""


class ConfigurationError(ValueError):
    """An option, an environment variable or the installation is wrong. The message is one line and says what to do."""


class BackendUnavailableError(ConfigurationError):
    """The backend or transport is known, but cannot run on this machine, or cannot connect a process set."""


class WorldMismatchError(ConfigurationError):
    """The backend joined a different world from the one that the launcher started."""


class CheckpointError(RuntimeError):
    """A checkpoint could not be saved or restored, or does not fit. Every rank raises it, and its message says why."""


class DamagedCheckpointError(CheckpointError):
    """A file differs from the checkpoint that was written, or loading it would run code."""


class HorovodInternalError(RuntimeError):
    """A collective failed on this rank. Same name and role as horovod.common.exceptions.HorovodInternalError."""


class NotInitializedError(HorovodInternalError, ValueError):
    """A call needs `init()` first. Horovod's rank() raises ValueError here, its collectives HorovodInternalError."""

    before_init = "dualdist has not been initialized; call dualdist.init() first."
    """The message before `init()`. dualdist.compat replaces it by Horovod's."""


class CollectiveMismatchError(HorovodInternalError):
    """The members of a process set called different collectives. Every member raises it."""


class StallError(HorovodInternalError):
    """A member did not call the collective within the stall timeout, `init(timeout=)`, by default 600 s."""


class HostsUpdatedInterrupt(RuntimeError):
    """The hosts of an elastic job have changed. Not an error: `elastic.run` catches it and joins the new world.

    skip_sync: whether hosts were only removed, so that every rank has the state already.
    """

    def __init__(self, skip_sync: bool) -> None:
        super().__init__("The hosts of this job have changed.")
        self.skip_sync = skip_sync


class ReplicaMismatchError(RuntimeError):
    """Parameters, buffers or the optimizer's state differ between ranks. Every member of the process set raises it."""


class ProcessEndedError(RuntimeError):
    """A process of `spawn` ended before its function returned, or raised an exception that cannot be sent.

    rank: the rank of that process. exit_code: its exit code, or minus the signal that ended it; None for an exception.
    """

    def __init__(self, message: str, rank: int, exit_code: int | None) -> None:
        super().__init__(message)
        self.rank = rank
        self.exit_code = exit_code

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (str(self), self.rank, self.exit_code)
