"""The names of horovod.common.exceptions."""

from __future__ import annotations

from ..elastic import HostsUpdatedInterrupt
from ..errors import HorovodInternalError

__all__ = ("HorovodInternalError", "HorovodVersionMismatchError", "HostsUpdatedInterrupt")


class HorovodVersionMismatchError(ImportError):
    """Never raised here: dualdist is not compiled against a version of torch."""
