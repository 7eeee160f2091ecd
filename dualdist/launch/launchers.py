"""The table of launchers: the environment variables in which each one gives a process its rank and the world's size.

Sources: torchrun, https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables; horovodrun,
horovod/runner/gloo_run.py:66; Open MPI, https://docs.open-mpi.org/en/main/tuning-apps/environment-var.html; MPICH and
Intel MPI, hydra's PMI; MVAPICH, its user guide 9.8; LSF's jsrun, JSM_NAMESPACE_* (horovod/runner/util/lsf.py and
Spectrum MPI); Slurm, srun(1) OUTPUT ENVIRONMENT VARIABLES.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ("DUALDIST_RUN", "ELASTIC_DIR", "LAUNCHERS", "SPAWN", "Launcher")

ELASTIC_DIR = "DUALDIST_ELASTIC_DIR"
"""The variable that names the folder of elastic commits."""

DUALDIST_RUN, SPAWN = "dualdist run", "spawn"
"""The launchers of dualdist itself."""


@dataclass(frozen=True)
class Launcher:
    """The variables that one launcher sets for its processes."""

    name: str
    rank: str
    size: str
    local_rank: str
    local_size: str
    markers: tuple[str, ...]
    """NAME or NAME=VALUE: any one of them shows that this launcher started the process."""
    inside: tuple[str, ...] = ()
    """Launchers that may have started this one. Their numbers describe the launcher, not this process."""
    starts_mpi: tuple[str, ...] = ()
    """Any one of these variables shows that the processes can join through MPI."""
    elastic: tuple[str, ...] = ()
    """NAME=VALUE: any one of them shows that the launcher changes the world while it runs."""
    restarts: tuple[str, ...] = ()
    """Any one of these variables, unless it is empty or 0, shows that the launcher restarts all processes."""
    starts_horovod: bool = False
    """Whether Horovod itself starts under this launcher: with its MPI controller if `starts_mpi`, else with Gloo."""
    node: str | None = None
    """The variable with this node's number. Then `local_size` lists the sizes of all nodes: 4(x2),3 is 4, 4, 3."""
    init_method: str | None = None
    """Where the processes meet, in the form of torch.distributed."""
    is_command: bool = True
    """Whether `name` is also the name of a program."""


# These pass on no variable of an outer launcher, so all others run inside them.
_OUTERMOST = (DUALDIST_RUN, SPAWN)
_SCHEDULERS = ("jsrun", "srun", *_OUTERMOST)
_MPI = ("mpirun", "mpirun_rsh", "mpiexec")

LAUNCHERS = (
    Launcher(
        "torchrun",
        rank="RANK",
        size="WORLD_SIZE",
        local_rank="LOCAL_RANK",
        local_size="LOCAL_WORLD_SIZE",
        markers=("TORCHELASTIC_RUN_ID",),
        inside=(*_MPI, *_SCHEDULERS),
        # torchrun hides from its processes that --nnodes is a range. Then it restarts them without --max-restarts, too.
        restarts=("TORCHELASTIC_MAX_RESTARTS", ELASTIC_DIR),
        init_method="env://",
    ),
    Launcher(
        "horovodrun",
        rank="HOROVOD_RANK",
        size="HOROVOD_SIZE",
        local_rank="HOROVOD_LOCAL_RANK",
        local_size="HOROVOD_LOCAL_SIZE",
        markers=("HOROVOD_RANK", "HOROVOD_SIZE"),
        inside=(*_MPI, *_SCHEDULERS),
        elastic=("HOROVOD_ELASTIC=1",),
        starts_horovod=True,
    ),
    Launcher(
        "jsrun",
        rank="JSM_NAMESPACE_RANK",
        size="JSM_NAMESPACE_SIZE",
        local_rank="JSM_NAMESPACE_LOCAL_RANK",
        local_size="JSM_NAMESPACE_LOCAL_SIZE",
        markers=("JSM_NAMESPACE_SIZE",),
        inside=_OUTERMOST,
        starts_mpi=("JSM_NAMESPACE_SIZE",),
    ),
    Launcher(
        "mpirun",
        rank="OMPI_COMM_WORLD_RANK",
        size="OMPI_COMM_WORLD_SIZE",
        local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
        local_size="OMPI_COMM_WORLD_LOCAL_SIZE",
        markers=("OMPI_COMM_WORLD_SIZE",),
        inside=_SCHEDULERS,
        starts_mpi=("OMPI_COMM_WORLD_SIZE",),
        starts_horovod=True,
    ),
    Launcher(
        "mpirun_rsh",
        rank="MV2_COMM_WORLD_RANK",
        size="MV2_COMM_WORLD_SIZE",
        local_rank="MV2_COMM_WORLD_LOCAL_RANK",
        local_size="MV2_COMM_WORLD_LOCAL_SIZE",
        markers=("MV2_COMM_WORLD_SIZE",),
        inside=_SCHEDULERS,
        starts_mpi=("MV2_COMM_WORLD_SIZE",),
    ),
    Launcher(
        "srun",
        rank="SLURM_PROCID",
        size="SLURM_STEP_NUM_TASKS",
        local_rank="SLURM_LOCALID",
        local_size="SLURM_STEP_TASKS_PER_NODE",
        markers=("SLURM_STEP_ID",),
        inside=_OUTERMOST,
        starts_mpi=("PMIX_RANK", "PMI_RANK", "PMI_FD", "PMI2_FD"),
        node="SLURM_NODEID",
    ),
    Launcher(
        "mpiexec",
        rank="PMI_RANK",
        size="PMI_SIZE",
        local_rank="MPI_LOCALRANKID",
        local_size="MPI_LOCALNRANKS",
        markers=("PMI_SIZE",),
        inside=_SCHEDULERS,
        starts_mpi=("PMI_SIZE",),
    ),
    Launcher(
        DUALDIST_RUN,
        rank="DUALDIST_RANK",
        size="DUALDIST_SIZE",
        local_rank="DUALDIST_LOCAL_RANK",
        local_size="DUALDIST_LOCAL_SIZE",
        markers=(f"DUALDIST_LAUNCHER={DUALDIST_RUN}",),
        inside=(SPAWN,),
        is_command=False,
    ),
    Launcher(
        SPAWN,
        rank="DUALDIST_RANK",
        size="DUALDIST_SIZE",
        local_rank="DUALDIST_LOCAL_RANK",
        local_size="DUALDIST_LOCAL_SIZE",
        markers=(f"DUALDIST_LAUNCHER={SPAWN}",),
        is_command=False,
    ),
    # torchrun's variables, set by hand or by a cluster.
    Launcher(
        "env",
        rank="RANK",
        size="WORLD_SIZE",
        local_rank="LOCAL_RANK",
        local_size="LOCAL_WORLD_SIZE",
        markers=("RANK", "WORLD_SIZE"),
        init_method="env://",
        is_command=False,
    ),
)
"""Where several launchers report the same numbers, the first row wins."""
