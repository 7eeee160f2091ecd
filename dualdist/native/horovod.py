"""Horovod's own module, real also where `dualdist.compat` answers to its name; its own optimizer is in it.

It is started when dualdist runs on the backend horovod; on another one, `hvd.init()` is the script's affair.
"""

from __future__ import annotations

from ..backends.horovod.installed import is_installed, real_horovod
from ..errors import BackendUnavailableError

if not is_installed():
    raise BackendUnavailableError("Horovod must be installed, but is not. Build it with ci/install-horovod.")

with real_horovod():
    import horovod.torch as hvd

__all__ = ("hvd",)
