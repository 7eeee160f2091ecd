"""Horovod's messages about changed hosts, also while `dualdist.compat` has the names of Horovod's modules."""

from __future__ import annotations

from typing import Any

import cloudpickle

from .installed import real_horovod

with real_horovod():
    from horovod.runner.common.util import network
    from horovod.runner.elastic.worker import WorkerNotificationManager

__all__ = ("Notifications",)


class _Pickles:
    """Replaces cloudpickle in Horovod's Wire: pickles name the modules of classes, which dualdist.compat replaces."""

    @staticmethod
    def dumps(message: Any, protocol: int | None = None) -> bytes:
        with real_horovod():
            return bytes(cloudpickle.dumps(message, protocol=protocol))

    @staticmethod
    def loads(data: bytes) -> Any:
        with real_horovod():
            return cloudpickle.loads(data)


class Notifications(WorkerNotificationManager):  # type: ignore[misc]
    """Receives the messages, and passes them to the listeners."""

    def init(self) -> None:
        """Listen, and send the address to horovodrun, which sends a test message at once. Local."""
        network.cloudpickle = _Pickles
        super().init()
