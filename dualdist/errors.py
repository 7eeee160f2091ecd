"""The errors that dualdist raises.

    Exception
    ├─ ValueError
    │  └─ ConfigurationError           an option, the environment or the installation is wrong
    │     ├─ BackendUnavailableError   the backend is known but cannot run here
    │     └─ WorldMismatchError        the launcher and the backend disagree on the world
    └─ RuntimeError
       ├─ ProcessEndedError            a process of dualdist.spawn died, or raised what cannot be sent
       ├─ CheckpointError              a checkpoint could not be saved or restored, or does not fit
       │  └─ DamagedCheckpointError    a file is not the one that was written, or holds what must not be loaded
       ├─ HostsUpdatedInterrupt        not an error: the hosts of an elastic job have changed
       └─ HorovodInternalError         a collective failed; elastic training recovers from it
          ├─ NotInitializedError       also a ValueError, as Horovod's rank() and size() raise one
          ├─ CollectiveMismatchError   the ranks called different things
          └─ StallError                a rank never came

Horovod's class names are kept where a script may catch them: `HorovodInternalError` and the built-in
`ValueError` for arguments that are wrong on this rank alone (horovod/common/exceptions.py, adapter_v2.cc:189).
"""

from __future__ import annotations

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
    "StallError",
    "WorldMismatchError",
)


class ConfigurationError(ValueError):
    """An option, an environment variable or the installation is wrong; the message is one line with the remedy."""


class BackendUnavailableError(ConfigurationError):
    """The backend or transport is known, but cannot run on this machine."""


class WorldMismatchError(ConfigurationError):
    """The backend joined another world than the launcher started."""


class CheckpointError(RuntimeError):
    """A checkpoint could not be saved or restored, or does not fit; every rank raises it, and knows what was kept."""


class DamagedCheckpointError(CheckpointError):
    """A file is not the checkpoint that was written, or it holds what only running code could load."""


class HorovodInternalError(RuntimeError):
    """A collective failed on this rank. Same name and role as horovod.common.exceptions.HorovodInternalError."""


class NotInitializedError(HorovodInternalError, ValueError):
    """A call needs `init()` first. A ValueError as in Horovod's rank(), a HorovodInternalError as in its ops."""


class CollectiveMismatchError(HorovodInternalError):
    """The members of a process set called different collectives; every one of them raises this."""


class StallError(HorovodInternalError):
    """A member of the process set did not call the collective within the stall timeout."""


class HostsUpdatedInterrupt(RuntimeError):
    """The hosts of an elastic job have changed; `elastic.run` joins the new world. Not an error.

    skip_sync: whether hosts have only gone, so that every rank has the state already.
    """

    def __init__(self, skip_sync: bool) -> None:
        super().__init__("The hosts of this job have changed.")
        self.skip_sync = skip_sync


class ProcessEndedError(RuntimeError):
    """A process of `spawn` ended before its function returned, or raised an exception that cannot be sent.

    rank: which one. exit_code: its exit code, or minus the signal that ended it; None for an exception.
    """

    def __init__(self, message: str, rank: int, exit_code: int | None) -> None:
        super().__init__(message)
        self.rank = rank
        self.exit_code = exit_code

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (str(self), self.rank, self.exit_code)
