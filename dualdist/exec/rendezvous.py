"""torch.distributed's rendezvous for processes that any launcher has started.

import dualdist.exec.rendezvous
torch.distributed.init_process_group(init_method="dualdist://")    # rank and size are the launcher's
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout
from torch.distributed.rendezvous import register_rendezvous_handler, rendezvous

from ..errors import ConfigurationError
from . import export_environment

_joined: list[tuple[dist.Store, int, int]] = []
"""The store of this job, which rank 0 serves until its process ends, and this process's rank and size."""
_numbers = itertools.count()
"""Of the groups that this process joins. Each has a part of the store for itself."""


def _meet(url: str, timeout: timedelta = default_pg_timeout, **options: Any) -> Iterator[Any]:
    """Yield (store, rank, size) once, as a rendezvous handler does. Collective over the launched processes."""
    if not _joined:
        export_environment()
        _joined.append(next(rendezvous("env://", timeout=timeout)))
    store, rank, size = _joined[0]
    given = dict(parse_qsl(urlsplit(url).query))
    for name, own in (("rank", rank), ("world_size", size)):
        if given.get(name, "-1") not in ("-1", str(own)):
            raise ConfigurationError(
                f"`{name}` must be absent or the launcher's, {own}, where init_method is 'dualdist://', but is "
                f"{given[name]} instead. Leave it out."
            )
    yield dist.PrefixStore(f"dualdist/{next(_numbers)}", store), rank, size


register_rendezvous_handler("dualdist", _meet)
