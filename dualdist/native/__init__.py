"""Direct access to the backends. It is not portable: the import path names the backend that a script needs.

    from dualdist.native.torch import DistributedDataParallel, process_group   # on each backend
    from dualdist.native.horovod import hvd                                    # needs the backend horovod

dualdist itself does not use this package. Its checks between the ranks do not cover these calls: a mismatch is the
backend's own error, or a hang.
"""

from __future__ import annotations
