"""The doors to what lies below, deliberately not portable: the import path says on which backend a script insists.

    from dualdist.native.torch import DistributedDataParallel, process_group   # needs the backend torch
    from dualdist.native.horovod import hvd                                    # needs the backend horovod

Nothing in dualdist comes through here. What is called this way goes past the agreement between the ranks: a mismatch
is the backend's own error, or a hang.
"""

from __future__ import annotations

__all__ = ()
