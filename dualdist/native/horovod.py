"""Horovod's own module, with its own optimizer, also while `dualdist.compat` replaces `horovod`.

On the backend horovod, dualdist has initialized it. On another backend, the script must call `hvd.init()` itself.
"""

from __future__ import annotations

from ..errors import BackendUnavailableError
from ..horovod import is_installed, real_horovod

__all__ = ("hvd",)

if not is_installed():
    raise BackendUnavailableError(
        "Horovod must be installed, but is not. Build it with dualdist install-horovod."
    )

with real_horovod():
    import horovod.torch as hvd
