"""What horovod.common.exceptions holds."""

from __future__ import annotations

from ..elastic import HostsUpdatedInterrupt
from ..errors import HorovodInternalError

__all__ = ("HorovodInternalError", "HorovodVersionMismatchError", "HostsUpdatedInterrupt")


class HorovodVersionMismatchError(ImportError):
    """Never raised here: nothing is compiled against a version of torch."""
