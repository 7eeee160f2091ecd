"""The names of horovod.common.exceptions."""

from __future__ import annotations

from ..elastic import HostsUpdatedInterrupt
from ..errors import HorovodInternalError

__all__ = (
    "HorovodInternalError",
    "HorovodVersionMismatchError",
    "HostsUpdatedInterrupt",
    "get_version_mismatch_message",
)


def get_version_mismatch_message(name: str, version: str, installed_version: str | None) -> str:
    """Return the message of HorovodVersionMismatchError."""
    return (
        f"Framework {name} installed with version {installed_version} but found version {version}. "
        "This can result in unexpected behavior including runtime errors."
    )


class HorovodVersionMismatchError(ImportError):
    """Never raised here: dualdist is not compiled against a version of torch."""

    def __init__(self, name: str, version: str, installed_version: str | None) -> None:
        super().__init__(get_version_mismatch_message(name, version, installed_version), name=name)
        self.version = version
        self.installed_version = installed_version
