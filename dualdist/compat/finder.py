"""The import hook: modules with Horovod's names, which contain dualdist's functions of the same names."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from types import ModuleType
from typing import NoReturn

__all__ = ("MODULES", "HorovodFinder")

_API = ("dualdist", "dualdist.compat.lifecycle")

MODULES: dict[str, tuple[str, ...]] = {
    "horovod": ("dualdist.compat.package",),
    "horovod.common": (),
    "horovod.common.basics": ("dualdist.compat.lifecycle",),
    "horovod.common.elastic": ("dualdist.elastic", "dualdist.compat.elastic", "dualdist.compat.exceptions"),
    "horovod.common.exceptions": ("dualdist.compat.exceptions",),
    "horovod.common.process_sets": ("dualdist.world.process_sets",),
    "horovod.common.util": ("dualdist.compat.util",),
    "horovod.data": ("dualdist.compat.data",),
    "horovod.data.data_loader_base": ("dualdist.compat.data",),
    "horovod.runner": ("dualdist.compat.package",),
    "horovod.runner.elastic": (),
    "horovod.runner.elastic.worker": ("dualdist.compat.elastic",),
    "horovod.torch": (*_API, "dualdist.compat.optimizer", "dualdist.compat.util:check_extension"),
    "horovod.torch.compression": ("dualdist.compat.compression",),
    "horovod.torch.elastic": (
        "dualdist.elastic",
        "dualdist.compat.elastic",
        "dualdist.compat.lifecycle:init",
        "dualdist:shutdown",
    ),
    "horovod.torch.elastic.sampler": ("dualdist.elastic", "dualdist:rank", "dualdist:size"),
    "horovod.torch.elastic.state": (*_API, "dualdist.elastic", "dualdist.compat.elastic"),
    "horovod.torch.functions": _API,
    "horovod.torch.mpi_ops": (*_API, "dualdist.compat.mpi_ops"),
    "horovod.torch.optimizer": (*_API, "dualdist.compat.optimizer", "dualdist.compat.util:split_list"),
    "horovod.torch.sync_batch_norm": (*_API, "dualdist.compat.sync_batch_norm"),
}
"""Horovod's module -> the modules of dualdist with its names. If two have the same name, the later one wins.
MODULE:NAME is one name alone."""

_INSTEAD = {
    "horovod.spark": "Use dualdist.run, or Spark's TorchDistributor with a function that calls hvd.init().",
    "horovod.ray": "Use Ray Train's TorchTrainer with a function that calls hvd.init().",
    "horovod.runner": "Use horovod.run, or the command `dualdist run`.",
}
"""Package -> what to use for those of its modules that do not exist here."""


class HorovodFinder(MetaPathFinder, Loader):
    """Finds and loads dualdist's modules under Horovod's names."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] != "horovod":
            return None
        if fullname not in MODULES:
            remedy = next(
                (f" {text}" for package, text in _INSTEAD.items() if fullname.startswith(package)), ""
            )
            raise ModuleNotFoundError(
                f"{fullname} is not available: dualdist.compat replaces only horovod.torch.{remedy} "
                "Start without dualdist.compat to import the installed Horovod.",
                name=fullname,
            )
        is_package = any(other.startswith(f"{fullname}.") for other in MODULES)
        return spec_from_loader(fullname, self, origin="dualdist.compat", is_package=is_package)

    def exec_module(self, module: ModuleType) -> None:
        module.__file__ = __file__
        for entry in MODULES[module.__name__]:
            path, _, only = entry.partition(":")
            source = importlib.import_module(path)
            public = [name for name in dir(source) if not name.startswith("_")]
            for name in [only] if only else getattr(source, "__all__", public):
                if not isinstance(getattr(source, name), ModuleType):
                    setattr(module, name, getattr(source, name))
        module.__getattr__ = functools.partial(_refuse, module.__name__)  # type: ignore[method-assign]
        for name in MODULES:
            if name.rpartition(".")[0] == module.__name__:
                importlib.import_module(name)


def _refuse(module: str, name: str) -> NoReturn:
    """Raise the AttributeError for a name that `module` does not have."""
    if name.startswith("__"):
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    public = "horovod.torch" if module.startswith("horovod.torch.") else module
    raise AttributeError(
        f"{module} has no {name!r} under dualdist.compat, which has the public names of Horovod 0.28.1 and the private "
        f"ones that scripts use. Use a public function of {public}, or start without dualdist.compat."
    )
