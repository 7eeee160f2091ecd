"""Launch detection: one row per launcher, and a pure function over a mapping.

Launchers are started inside one another (torchrun inside a Slurm step), so several may have left their variables. The
innermost is the one that may stand inside all others that tell another rank or size. Where the numbers are the same,
the order of the rows decides. Facts about the variables: torchrun,
https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables; horovodrun, horovod/runner/gloo_run.py:66;
Open MPI, https://docs.open-mpi.org/en/main/tuning-apps/environment-var.html; MPICH and Intel MPI, hydra's PMI; MVAPICH,
its user guide 9.8; LSF's jsrun, JSM_NAMESPACE_* (horovod/runner/util/lsf.py and Spectrum MPI); Slurm, srun(1) OUTPUT
ENVIRONMENT VARIABLES.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from ..errors import ConfigurationError
from ..types import Launch

__all__ = ("ELASTIC_DIR", "LAUNCHERS", "Launcher", "detect")

ELASTIC_DIR = "DUALDIST_ELASTIC_DIR"
"""The variable that says where elastic commits go."""


@dataclass(frozen=True)
class Launcher:
    """The names that one launcher puts into the environment of its processes."""

    name: str
    rank: str
    size: str
    local_rank: str
    local_size: str
    markers: tuple[str, ...]
    """NAME or NAME=VALUE: the variables of which any one says that this launcher started the process."""
    inside: tuple[str, ...] = ()
    """The launchers that may have started this one: their numbers are of other processes, the launcher's own."""
    starts_mpi: tuple[str, ...] = ()
    """The variables of which any one says that MPI joins the processes."""
    node: str | None = None
    """The number of this node; `local_size` then tells all nodes' sizes, as Slurm does: 4(x2),3 for 4, 4, 3."""
    init_method: str | None = None


_OWN = ("DUALDIST_RANK", "DUALDIST_SIZE", "DUALDIST_LOCAL_RANK", "DUALDIST_LOCAL_SIZE")
_OUTERMOST = (
    "dualdist run",
    "spawn",
)  # they hand on nothing of the launcher around them, so all others are inside
_SCHEDULERS = ("jsrun", "srun", *_OUTERMOST)
_MPI = ("mpirun", "mpirun_rsh", "mpiexec")

LAUNCHERS = (
    Launcher(
        "torchrun",
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        ("TORCHELASTIC_RUN_ID",),
        (*_MPI, *_SCHEDULERS),
        init_method="env://",
    ),
    Launcher(
        "horovodrun",
        "HOROVOD_RANK",
        "HOROVOD_SIZE",
        "HOROVOD_LOCAL_RANK",
        "HOROVOD_LOCAL_SIZE",
        ("HOROVOD_RANK", "HOROVOD_SIZE"),
        (*_MPI, *_SCHEDULERS),
    ),
    Launcher(
        "jsrun",
        "JSM_NAMESPACE_RANK",
        "JSM_NAMESPACE_SIZE",
        "JSM_NAMESPACE_LOCAL_RANK",
        "JSM_NAMESPACE_LOCAL_SIZE",
        ("JSM_NAMESPACE_SIZE",),
        _OUTERMOST,
        ("JSM_NAMESPACE_SIZE",),
    ),
    Launcher(
        "mpirun",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        ("OMPI_COMM_WORLD_SIZE",),
        _SCHEDULERS,
        ("OMPI_COMM_WORLD_SIZE",),
    ),
    Launcher(
        "mpirun_rsh",
        "MV2_COMM_WORLD_RANK",
        "MV2_COMM_WORLD_SIZE",
        "MV2_COMM_WORLD_LOCAL_RANK",
        "MV2_COMM_WORLD_LOCAL_SIZE",
        ("MV2_COMM_WORLD_SIZE",),
        _SCHEDULERS,
        ("MV2_COMM_WORLD_SIZE",),
    ),
    Launcher(
        "srun",
        "SLURM_PROCID",
        "SLURM_STEP_NUM_TASKS",
        "SLURM_LOCALID",
        "SLURM_STEP_TASKS_PER_NODE",
        ("SLURM_STEP_ID",),
        _OUTERMOST,
        ("PMIX_RANK", "PMI_RANK", "PMI_FD", "PMI2_FD"),
        node="SLURM_NODEID",
    ),
    Launcher(
        "mpiexec",
        "PMI_RANK",
        "PMI_SIZE",
        "MPI_LOCALRANKID",
        "MPI_LOCALNRANKS",
        ("PMI_SIZE",),
        _SCHEDULERS,
        ("PMI_SIZE",),
    ),
    Launcher("dualdist run", *_OWN, ("DUALDIST_LAUNCHER=dualdist run",), ("spawn",)),
    Launcher("spawn", *_OWN, ("DUALDIST_LAUNCHER=spawn",)),
    Launcher(
        "env",
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        ("RANK", "WORLD_SIZE"),
        init_method="env://",
    ),
)

_OF_LARGER_WORLDS = ("RANK", "SLURM_NTASKS")
"""What is told of, but starts nothing by itself."""

_OF_RESTARTS = ("TORCHELASTIC_MAX_RESTARTS", ELASTIC_DIR)
"""torchrun does not tell its processes that --nnodes is a range, which without --max-restarts restarts them, too."""


def detect(env: Mapping[str, str]) -> Launch:
    """Return who this process is according to `env`; plain python is a world of one.

    Variables without which a launcher starts nothing (SLURM_* outside a step, RANK without WORLD_SIZE) count for
    nothing. Raises ConfigurationError when a launcher's variables are not numbers, contradict each other, or
    contradict another launcher's that does not stand around it.
    """
    rows = [row for row in LAUNCHERS if _has_left_its_mark(row, env)]
    launches = [_read(row, env) for row in rows]
    if not launches:
        return _plain_python(env)
    strangers = []
    for row, launch in zip(rows, launches, strict=True):
        inside = (launch.launcher, *row.inside)
        disagreeing = [
            other for other in launches if other.launcher not in inside and not _agree(other, launch)
        ]
        if not disagreeing:
            return _located(launch, row, env)
        strangers += disagreeing
    one, other = launches[0], strangers[0]
    raise ConfigurationError(
        f"Rank and size must be the same wherever they are told, but are {one.describe('rank')} and "
        f"{one.describe('size')} of {one.launcher}, and {other.describe('rank')} and {other.describe('size')} of "
        f"{other.launcher} instead. Unset the variables of the one that did not start this process."
    )


def _has_left_its_mark(row: Launcher, env: Mapping[str, str]) -> bool:
    if row.name == "env":  # torchrun's variables once more, unless someone else has set both
        return bool(env.get("RANK") and env.get("WORLD_SIZE")) and not env.get("TORCHELASTIC_RUN_ID")
    return any(_is_set(env, marker) for marker in row.markers) and not _are_copies(row, env)


def _is_set(env: Mapping[str, str], marker: str) -> bool:
    name, _, value = marker.partition("=")
    return bool(env.get(name)) and value in ("", env[name])


def _agree(one: Launch, other: Launch) -> bool:
    return (one.rank, one.size) == (other.rank, other.size)


def _are_copies(launcher: Launcher, env: Mapping[str, str]) -> bool:
    """Return whether dualdist.compat has set horovodrun's names, as it does for scripts under every launcher.

    A horovodrun inside such a script sets them itself, and brings its rendezvous.
    """
    copied = launcher.rank == "HOROVOD_RANK" and bool(env.get("DUALDIST_COMPAT"))
    return copied and not env.get("HOROVOD_GLOO_RENDEZVOUS_ADDR")


def _read(launcher: Launcher, env: Mapping[str, str]) -> Launch:
    names = {field: getattr(launcher, field) for field in ("rank", "size", "local_rank", "local_size")}
    values = {field: _number(env, name, launcher) for field, name in names.items()}
    rank, size = values["rank"], values["size"]
    if rank is None or size is None:
        missing, present = names["rank"], [name for name in launcher.markers if env.get(name)]
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
    return Launch(
        launcher.name,
        rank,
        size,
        values["local_rank"],
        values["local_size"],
        MappingProxyType(names),
        elastic=launcher.name == "horovodrun" and env.get("HOROVOD_ELASTIC") == "1",
        restarts=launcher.name == "torchrun"
        and any(env.get(name, "") not in ("", "0") for name in _OF_RESTARTS),
        starts_mpi=any(env.get(name) for name in launcher.starts_mpi),
    )


def _located(launch: Launch, launcher: Launcher, env: Mapping[str, str]) -> Launch:
    """Return `launch` with the place where its processes meet, if the environment tells it."""
    if env.get("MASTER_ADDR") and env.get("MASTER_PORT"):
        return dataclasses.replace(launch, init_method="env://")
    if launcher.init_method == "env://" and launch.size > 1:
        raise ConfigurationError(
            f"`MASTER_ADDR` and `MASTER_PORT` must be set beside {launcher.size}={launch.size}, but are absent. "
            "Set both to the address of rank 0, or start with torchrun."
        )
    return dataclasses.replace(launch, init_method=launcher.init_method)


def _plain_python(env: Mapping[str, str]) -> Launch:
    """Return a world of one. Raises ConfigurationError when a larger world was told of, but no rank in it."""
    size = env.get("WORLD_SIZE", "")
    if size not in ("", "0", "1"):
        raise ConfigurationError(
            f"`RANK` must be set beside WORLD_SIZE={size}, but is absent. "
            "Set both for every process, or unset WORLD_SIZE to run a single process."
        )
    if env.get("PET_NNODES", "") not in (
        "",
        "1",
    ):  # Kubeflow Trainer tells torchrun, and torchrun alone, of its nodes
        raise ConfigurationError(
            f"`torchrun` must be the command where PET_NNODES={env['PET_NNODES']} is set, but is absent. "
            "Start the script with torchrun, which reads PET_*, or unset it to run a single process."
        )
    ignored = tuple(
        f"{name}={env[name]}" for name in _OF_LARGER_WORLDS if env.get(name, "") not in ("", "0", "1")
    )
    sources = MappingProxyType({"rank": "plain python", "size": "plain python"})
    return Launch("python", sources=sources, ignored=ignored)


def _number(env: Mapping[str, str], name: str, launcher: Launcher) -> int | None:
    text = env.get(name, "")
    if launcher.node is not None and name == launcher.local_size:
        text = _of_node(text, env.get(launcher.node, ""))
    if not text:
        return None
    if text.isdecimal():
        return int(text)
    raise ConfigurationError(
        f"`{name}` must be a whole number, but is {text!r} instead. "
        f"It is set by {launcher.name}; look at what overwrites it."
    )


def _of_node(text: str, node: str) -> str:
    """Return the entry of `node` in Slurm's list of sizes, '' when it tells none: the backend counts after init."""
    sizes: list[str] = []
    for entry in text.split(","):
        told = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", entry)
        if told is None:
            return text
        sizes += [told[1]] * int(told[2] or 1)
    if len(set(sizes)) == 1:
        return sizes[0]
    return sizes[int(node)] if node.isdecimal() and int(node) < len(sizes) else ""
