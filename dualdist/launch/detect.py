"""Launch detection: one row per launcher, and a pure function over a mapping.

The rows stand in order of nearness: a launcher that is usually started inside another one comes first
(torchrun or horovodrun inside a Slurm step, mpirun inside a Slurm allocation). Facts about the variables: torchrun,
https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables; horovodrun,
horovod/runner/gloo_run.py:66; Open MPI, https://docs.open-mpi.org/en/main/tuning-apps/environment-var.html; MPICH and
Intel MPI, hydra's PMI; Slurm, srun(1) OUTPUT ENVIRONMENT VARIABLES.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from ..errors import ConfigurationError
from ..types import Launch

__all__ = ("LAUNCHERS", "Launcher", "detect")


@dataclass(frozen=True)
class Launcher:
    """The names that one launcher puts into the environment of its processes."""

    name: str
    rank: str
    size: str
    local_rank: str
    local_size: str
    markers: tuple[str, ...]
    """The variables of which any one says that this launcher started the process; NAME=VALUE: by that value."""
    init_method: str | None = None


_DUALDIST = ("DUALDIST_RANK", "DUALDIST_SIZE", "DUALDIST_LOCAL_RANK", "DUALDIST_LOCAL_SIZE")

LAUNCHERS = (
    Launcher("dualdist run", *_DUALDIST, ("DUALDIST_LAUNCHER=dualdist run",)),
    Launcher("spawn", *_DUALDIST, ("DUALDIST_LAUNCHER=spawn",)),
    Launcher("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", ("TORCHELASTIC_RUN_ID",), "env://"),
    Launcher(
        "horovodrun", "HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE",
        ("HOROVOD_RANK", "HOROVOD_SIZE"),
    ),
    Launcher(
        "mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE", ("OMPI_COMM_WORLD_SIZE",),
    ),
    Launcher(
        "srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE",
        ("SLURM_STEP_ID",),
    ),
    Launcher("mpiexec", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", ("PMI_SIZE",)),
    Launcher("env", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", ("RANK", "WORLD_SIZE"), "env://"),
)  # fmt: skip


def detect(env: Mapping[str, str]) -> Launch:
    """Return who this process is according to `env`; plain python is a world of one.

    Raises ConfigurationError when the launcher's own variables contradict each other or are not numbers.
    """
    for launcher in LAUNCHERS:
        if any(_is_set(marker, env) for marker in launcher.markers) and not _are_copies(launcher, env):
            return _read(launcher, env)
    return Launch(
        "python", 0, 1, None, None, MappingProxyType({"rank": "plain python", "size": "plain python"})
    )


def _is_set(marker: str, env: Mapping[str, str]) -> bool:
    name, _, value = marker.partition("=")
    return env.get(name) == value if value else bool(env.get(name))


def _are_copies(launcher: Launcher, env: Mapping[str, str]) -> bool:
    """Return whether dualdist.compat has set horovodrun's names, as it does for scripts under every launcher.

    A horovodrun inside such a script sets them itself, and brings its rendezvous.
    """
    copied = launcher.rank == "HOROVOD_RANK" and bool(env.get("DUALDIST_COMPAT"))
    return copied and not env.get("HOROVOD_GLOO_RENDEZVOUS_ADDR")


def _read(launcher: Launcher, env: Mapping[str, str]) -> Launch:
    names = {field: getattr(launcher, field) for field in ("rank", "size", "local_rank", "local_size")}
    values = {field: _number(env, name, launcher.name) for field, name in names.items()}
    rank, size = values["rank"], values["size"]
    if rank is None or size is None:
        missing, present = names["rank"], [marker for marker in launcher.markers if _is_set(marker, env)]
        if rank is not None:
            missing = names["size"]
        raise ConfigurationError(
            f"`{missing}` must be set beside {present[0]}, but is absent. "
            f"Set both for every process, or unset {present[0]} to run a single process."
        )
    if not 0 <= rank < size:
        raise ConfigurationError(
            f"`{names['rank']}` must be at least 0 and less than {names['size']}={size}, but is {rank} instead. "
            "Give every process its own rank."
        )
    init_method = launcher.init_method
    if env.get("MASTER_ADDR") and env.get("MASTER_PORT"):
        init_method = "env://"
    elif init_method == "env://" and size > 1:
        raise ConfigurationError(
            f"`MASTER_ADDR` and `MASTER_PORT` must be set beside {names['size']}={size}, but are absent. "
            "Set both to the address of rank 0, or start with torchrun."
        )
    return Launch(
        launcher.name,
        rank,
        size,
        values["local_rank"],
        values["local_size"],
        MappingProxyType(names),
        init_method,
        elastic=launcher.name == "horovodrun" and env.get("HOROVOD_ELASTIC") == "1",
    )


def _number(env: Mapping[str, str], name: str, launcher: str) -> int | None:
    text = env.get(name, "")
    uniform = re.fullmatch(r"(\d+)(\(x\d+\))?", text)  # Slurm writes 2(x3) for three nodes of two tasks
    if uniform:
        return int(uniform[1])
    if not text or (launcher == "srun" and "," in text):  # uneven nodes: the engine counts them after init
        return None
    raise ConfigurationError(
        f"`{name}` must be a whole number, but is {text!r} instead. "
        f"It is set by {launcher}; look at what overwrites it."
    )
