"""Writing the checkpoints of a run on the writer, at once or in the background."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .background import Background
from .contents.host_copy import HostCopy, on_host
from .storage.catalog import Catalog
from .storage.manifest import make_manifest

__all__ = ("Saver",)


class Saver:
    """Writes numbered checkpoints into the folder of `catalog`, one at a time. All methods are local to the writer."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._copy = HostCopy()
        self.background = Background()

    def save(
        self, values: Mapping[str, Any], step: int, metrics: Mapping[str, float], *, in_background: bool
    ) -> None:
        """Write `values`. In the background: return when they are copied. The last save must have finished.

        Raises CheckpointError when they cannot be written. In the background, `background.finish` raises it.
        """
        manifest = make_manifest(step, metrics, self._catalog.next_serial)
        if in_background:
            copied = self._copy.take(values, "state")
            self.background.start(lambda: self._catalog.write(copied, manifest))
        else:
            self._catalog.write(on_host(values, "state"), manifest)
