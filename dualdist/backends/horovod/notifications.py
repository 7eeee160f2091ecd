"""Horovod's messages about changed hosts, also while `dualdist.compat` has the names of Horovod's modules."""

from __future__ import annotations

from typing import Any

from .installed import real_horovod

with real_horovod():
    import cloudpickle
    from horovod.runner.common.util import network
    from horovod.runner.elastic.worker import WorkerNotificationManager

__all__ = ("Notifications",)


class _Pickles:
    """Takes the place of cloudpickle in Horovod's Wire: pickles name the classes of messages by Horovod's modules."""

    @staticmethod
    def dumps(message: Any, protocol: int | None = None) -> Any:
        with real_horovod():
            return cloudpickle.dumps(message, protocol=protocol)

    @staticmethod
    def loads(data: bytes) -> Any:
        with real_horovod():
            return cloudpickle.loads(data)


class Notifications(WorkerNotificationManager):  # type: ignore[misc]
    """Receives the messages, and passes them to the listeners."""

    def init(self) -> None:
        """Listen, and tell horovodrun where; it sends a message at once, to see whether one arrives. Local."""
        network.cloudpickle = _Pickles
        super().init()
