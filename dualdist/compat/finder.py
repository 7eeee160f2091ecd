"""The import hook: modules with Horovod's names, which contain dualdist's functions of the same names."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from types import ModuleType

__all__ = ("MODULES", "HorovodFinder")

_API = ("dualdist", "dualdist.compat.lifecycle")

MODULES: dict[str, tuple[str, ...]] = {
    "horovod": ("dualdist.compat.package",),
    "horovod.common": (),
    "horovod.common.basics": ("dualdist.compat.lifecycle",),
    "horovod.common.elastic": ("dualdist.elastic",),
    "horovod.common.exceptions": ("dualdist.compat.exceptions",),
    "horovod.common.process_sets": ("dualdist.world.process_sets",),
    "horovod.common.util": ("dualdist.compat.util",),
    "horovod.runner": ("dualdist.compat.package",),
    "horovod.torch": _API,
    "horovod.torch.compression": ("dualdist.compat.compression",),
    "horovod.torch.elastic": ("dualdist.elastic",),
    "horovod.torch.elastic.sampler": ("dualdist.elastic",),
    "horovod.torch.elastic.state": ("dualdist.elastic",),
    "horovod.torch.functions": _API,
    "horovod.torch.mpi_ops": _API,
    "horovod.torch.optimizer": _API,
    "horovod.torch.sync_batch_norm": _API,
}
"""Horovod's module -> the modules of dualdist with its names. If two have the same name, the later one wins."""


class HorovodFinder(MetaPathFinder, Loader):
    """Finds and loads dualdist's modules under Horovod's names."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] != "horovod":
            return None
        if fullname not in MODULES:
            raise ModuleNotFoundError(
                f"{fullname} is not available: dualdist.compat replaces only horovod.torch. "
                "Start without it to import the installed Horovod.",
                name=fullname,
            )
        is_package = any(other.startswith(f"{fullname}.") for other in MODULES)
        return spec_from_loader(fullname, self, origin="dualdist.compat", is_package=is_package)

    def exec_module(self, module: ModuleType) -> None:
        for source in map(importlib.import_module, MODULES[module.__name__]):
            public = [name for name in dir(source) if not name.startswith("_")]
            for name in getattr(source, "__all__", public):
                if not isinstance(getattr(source, name), ModuleType):
                    setattr(module, name, getattr(source, name))
        for name in MODULES:
            if name.rpartition(".")[0] == module.__name__:
                importlib.import_module(name)
