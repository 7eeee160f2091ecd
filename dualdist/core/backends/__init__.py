"""The backends and their transports. Only this folder compares their names.

A backend is imported only when it is needed, so that commands which only start processes import no torch.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, cast

from ...errors import BackendUnavailableError, ConfigurationError
from .. import extension, loaded, needed
from ..checks import wrong
from ..types import Launch

if TYPE_CHECKING:
    from .base import Backend

BACKENDS = {"torch": "torch", "horovod": "horovod", "local": "torch"}
"""name -> the package that it needs."""

DISTRIBUTED_BACKENDS = ("torch", "horovod")
"""The backends that can join several processes."""
DEFAULT_BACKEND = "torch"
"""The backend under launchers that have no backend of their own."""
HOROVOD_BACKENDS = ("horovod",)
"""The backends that run Horovod itself, so that Horovod's settings (HOROVOD_FUSION_THRESHOLD, ...) have an effect."""

_INSTALL = {"horovod": "dualdist install-horovod", "torch": "pip install torch"}


@dataclass(frozen=True)
class Transport:
    """What a transport needs."""

    needs_gpus: bool = False
    """Whether each process needs a GPU of its own."""
    needs_mpi: bool = False
    """Whether a launcher that starts MPI must start the processes."""
    comes_with_torch: bool = True
    """Whether no other package is needed, such as torch_npu."""
    others: tuple[str, ...] = ()
    """Names of torch's other backends that are the same transport."""


TRANSPORTS = {
    # torch/distributed/distributed_c10d.py of 2.15; ncclx is that of torchcomms
    "nccl": Transport(needs_gpus=True, others=("nccl2", "nccl-legacy", "nccl-lazy", "ncclx")),
    "xccl": Transport(needs_gpus=True),
    "hccl": Transport(needs_gpus=True, comes_with_torch=False),
    "cncl": Transport(needs_gpus=True, comes_with_torch=False),
    "gloo": Transport(),
    "mpi": Transport(needs_mpi=True, others=("mpi4py",)),
}


def transport_named(backend: str) -> str:
    """Return the transport that torch's backend called `backend` is, its own name for one that is unknown."""
    return next((name for name, known in TRANSPORTS.items() if backend in known.others), backend)


def needs_gpus(backend: str) -> bool:
    """Return whether torch's backend called `backend` needs a GPU for each process. An unknown one does not."""
    return TRANSPORTS.get(transport_named(backend), Transport()).needs_gpus


def check_transport(transport: str | None) -> None:
    """Raise ConfigurationError unless `transport` is None or the name of a transport."""
    if transport is not None and transport_named(transport) not in tuple(TRANSPORTS):  # it may be unhashable
        raise ConfigurationError(
            f"`transport` must be one of {', '.join(TRANSPORTS)}, but is {transport!r} instead. "
            "Choose one of these, or leave it out to use the fastest one on this machine."
        )


def load(name: str) -> type[Backend]:
    """Return the backend class called `name`.

    Raises ConfigurationError for an unknown name, BackendUnavailableError when its package is not installed.
    """
    if name not in BACKENDS:
        fix = "Choose one of these, or leave it out to let the launcher decide."
        raise wrong("backend", f"one of {', '.join(BACKENDS)}", name, fix, ConfigurationError)
    package = BACKENDS[name]
    if not _is_installed(package):
        raise BackendUnavailableError(
            f"`backend` is {name!r}, but {package} is not installed. Install it with {_INSTALL[package]}, "
            "or choose another backend."
        )
    return cast("type[Backend]", needed(f"{name}_backend"))


def _is_installed(package: str) -> bool:
    if package == "horovod":
        horovod = extension("horovod")
        return horovod is not None and horovod.is_installed()
    return importlib.util.find_spec(package) is not None


class Choice(NamedTuple):
    """What `init` starts."""

    backend: type[Backend]
    transport: str | None
    """The one that the user asks for; None: the backend takes the fastest one on this machine."""
    reason: str
    """Why this backend, in a few words."""


def choose(asked: str | None, transport: str | None, launch: Launch, env: Mapping[str, str]) -> Choice:
    """Return the backend and the transport to use. asked, transport: the arguments of `init`.

    The first of these decides on the backend: the argument, DUALDIST_BACKEND, a backend that already runs in this
    process, the launcher. On the transport: the argument, DUALDIST_TRANSPORT.

    Raises ConfigurationError for an unknown name, BackendUnavailableError when the backend is not installed.
    """
    transport = transport or env.get("DUALDIST_TRANSPORT") or None
    check_transport(transport)

    def choice(name: str, reason: str) -> Choice:
        return Choice(load(name), transport, reason)

    if asked is not None:
        return choice(asked, "asked for by init(backend=)")
    if env.get("DUALDIST_BACKEND"):
        return choice(env["DUALDIST_BACKEND"], "asked for by DUALDIST_BACKEND")
    # dualdist.compat, which imports this part, hides Horovod's modules.
    horovod = extension("horovod") if "horovod" in sys.modules else loaded("horovod")
    imported = {"torch": "torch.distributed" in sys.modules, "horovod": horovod is not None and horovod.is_imported()}
    for name, is_imported in imported.items():
        if is_imported and load(name).is_running():
            return choice(name, f"{name} already runs in this process")
    if transport is None and not launch.by_launcher and launch.init_method is None:
        return choice("local", "a single process")
    # A launcher that starts MPI needs a Horovod that was built with MPI.
    starts_horovod = launch.starts_horovod and _is_installed("horovod")
    if starts_horovod and (not launch.starts_mpi or load("horovod").can_start(launch, env)):
        return choice("horovod", f"started by {launch.launcher} with Horovod installed")
    return choice(DEFAULT_BACKEND, f"started by {launch.launcher}")
