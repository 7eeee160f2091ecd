"""The table of launchers: the environment variables in which each one gives a process its rank and the world's size.

Sources: torchrun, https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables; horovodrun,
horovod/runner/gloo_run.py:66; Open MPI, https://docs.open-mpi.org/en/main/tuning-apps/environment-var.html; MPICH and
Intel MPI, hydra's PMI; MVAPICH, its user guide 9.8; LSF's jsrun, JSM_NAMESPACE_* (horovod/runner/util/lsf.py and
Spectrum MPI); Slurm, srun(1) OUTPUT ENVIRONMENT VARIABLES; Flux, flux-environment(7); PALS, its header pals.h;
prterun, PRRTE src/mca/schizo/prte/schizo_prte.c:setup_fork. tests/unit/environments has one environment of each.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

ELASTIC_DIR = "DUALDIST_ELASTIC_DIR"
"""The variable that names the folder of elastic commits."""

DUALDIST_RUN, SPAWN = "dualdist run", "spawn"
"""The launchers of dualdist itself."""

SITE = "site"
"""The launcher that the variables DUALDIST_RANK_FROM and others describe. See site.py."""


@dataclass(frozen=True)
class Launcher:
    """The variables that one launcher sets for its processes."""

    name: str
    rank: str
    size: str | None
    """None: no variable has it, and only MPI can report it."""
    local_rank: str | None
    local_size: str | None
    markers: tuple[str, ...]
    """NAME or NAME=VALUE: any one of them shows that this launcher started the process."""
    inside: tuple[str, ...] = ()
    """Launchers that may have started this one. Their numbers describe the launcher, not this process."""
    set_too_by: tuple[str, ...] = ()
    """Launchers that set this row's variables beside their own. Where one reports the same numbers, it counts alone."""
    starts_mpi: tuple[str, ...] = ()
    """Any one of these variables shows that the processes can join through MPI."""
    elastic: tuple[str, ...] = ()
    """NAME=VALUE: any one of them shows that the launcher changes the world while it runs."""
    restarts: tuple[str, ...] = ()
    """Any one of these variables, unless it is empty or 0, shows that the launcher restarts all processes."""
    starts_horovod: bool = False
    """Whether Horovod itself starts under this launcher: with its MPI controller if `starts_mpi`, else with Gloo."""
    asks_mpi: bool = False
    """Whether MPI may report the size where the variables do not."""
    pmix_namespace: str = ""
    """How PMIX_NAMESPACE starts if this launcher has set it, as far as that is known."""
    node: str | None = None
    """The variable with this node's number. Then `local_size` lists the sizes of all nodes: 4(x2),3 is 4, 4, 3."""
    init_method: str | None = None
    """Where the processes meet, in the form of torch.distributed."""
    is_command: bool = True
    """Whether `name` is also the name of a program."""


# These pass on no variable of an outer launcher, so all others run inside them.
_OUTERMOST = (DUALDIST_RUN, SPAWN)
_SCHEDULERS = ("jsrun", "srun", "flux", "PALS", *_OUTERMOST)
_MPI = ("mpirun", "mpirun_rsh", "mpiexec", "prterun", "PMIx")

LAUNCHERS = (
    Launcher(
        "torchrun",
        rank="RANK",
        size="WORLD_SIZE",
        local_rank="LOCAL_RANK",
        local_size="LOCAL_WORLD_SIZE",
        markers=("TORCHELASTIC_RUN_ID",),
        inside=(*_MPI, *_SCHEDULERS, SITE),
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
        inside=(*_MPI, *_SCHEDULERS, SITE),
        elastic=("HOROVOD_ELASTIC=1",),
        starts_horovod=True,
    ),
    Launcher(
        "jsrun",
        rank="JSM_NAMESPACE_RANK",
        size="JSM_NAMESPACE_SIZE",
        local_rank="JSM_NAMESPACE_LOCAL_RANK",
        local_size="JSM_NAMESPACE_LOCAL_SIZE",
        markers=("JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_RANK"),
        inside=_OUTERMOST,
        starts_mpi=("JSM_NAMESPACE_SIZE",),
    ),
    Launcher(
        "mpirun",
        rank="OMPI_COMM_WORLD_RANK",
        size="OMPI_COMM_WORLD_SIZE",
        local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
        local_size="OMPI_COMM_WORLD_LOCAL_SIZE",
        markers=("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
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
        markers=("MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK"),
        inside=_SCHEDULERS,
        starts_mpi=("MV2_COMM_WORLD_SIZE",),
    ),
    Launcher(
        "srun",
        rank="SLURM_PROCID",
        size="SLURM_STEP_NUM_TASKS",
        local_rank="SLURM_LOCALID",
        local_size="SLURM_STEP_TASKS_PER_NODE",
        markers=("SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS"),
        inside=_OUTERMOST,
        starts_mpi=("PMIX_RANK", "PMI_RANK", "PMI_FD", "PMI2_FD"),
        # src/plugins/mpi/pmix/pmixp_info.c:pmixp_info_set
        pmix_namespace="slurm.pmix.",
        node="SLURM_NODEID",
    ),
    # `flux start`, under another launcher, removes PMI_* and SLURM_* for its batch script (flux-environment(7)).
    Launcher(
        "flux",
        rank="FLUX_TASK_RANK",
        size="FLUX_JOB_SIZE",
        local_rank="FLUX_TASK_LOCAL_ID",
        # FLUX_JOB_NNODES does not say which node has how many tasks.
        local_size=None,
        markers=("FLUX_TASK_RANK", "FLUX_JOB_SIZE"),
        inside=("jsrun", "srun", "PALS", *_OUTERMOST),
        starts_mpi=("PMIX_RANK", "PMI_RANK", "PMI_FD"),
    ),
    # mpiexec and aprun of HPE Cray EX. With `--pmi=pmix`, no variable has the size.
    Launcher(
        "PALS",
        rank="PALS_RANKID",
        size="PMI_SIZE",
        local_rank="PALS_LOCAL_RANKID",
        local_size="PALS_LOCAL_SIZE",
        markers=("PALS_RANKID",),
        inside=_OUTERMOST,
        # Slurm's plugin cray_shasta (mpi_cray_shasta.c:mpi_p_slurmstepd_task) and Flux's cray-pals.
        set_too_by=("srun", "flux"),
        starts_mpi=("PMIX_RANK", "PMI_RANK"),
        asks_mpi=True,
        is_command=False,
    ),
    Launcher(
        "mpiexec",
        rank="PMI_RANK",
        size="PMI_SIZE",
        local_rank="MPI_LOCALRANKID",
        local_size="MPI_LOCALNRANKS",
        markers=("PMI_SIZE", "PMI_RANK"),
        inside=_SCHEDULERS,
        set_too_by=("jsrun", "srun", "flux", "PALS"),
        starts_mpi=("PMI_SIZE",),
    ),
    # Open MPI's mpirun is prterun and sets PRTE_LAUNCHED, too.
    Launcher(
        "prterun",
        rank="PMIX_RANK",
        size=None,
        local_rank=None,
        local_size=None,
        markers=("PRTE_LAUNCHED",),
        inside=_SCHEDULERS,
        set_too_by=("mpirun",),
        starts_mpi=("PMIX_RANK",),
        asks_mpi=True,
    ),
    Launcher(
        "PMIx",
        rank="PMIX_RANK",
        size=None,
        local_rank=None,
        local_size=None,
        markers=("PMIX_RANK", "PMIX_NAMESPACE"),
        inside=_SCHEDULERS,
        set_too_by=("jsrun", "mpirun", "mpirun_rsh", "srun", "flux", "PALS", "mpiexec", "prterun"),
        starts_mpi=("PMIX_RANK",),
        asks_mpi=True,
        is_command=False,
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


# Starting a command under mpirun: for `dualdist doctor`, and for the agents of `dualdist run --start-with mpirun`.


def mpirun_command(size: int, command: Sequence[str]) -> list[str] | None:
    """Return the command line that runs `command` in `size` processes of this host; None if mpirun is not on PATH.

    Open MPI's mpirun is allowed to start more processes than there are cores, and to run as root.
    """
    mpirun = shutil.which("mpirun")
    if mpirun is None:
        return None
    options = ["-np", str(size)]
    if is_open_mpi(mpirun):
        options += ["--oversubscribe", *["--allow-run-as-root"] * (os.getuid() == 0)]
    return [mpirun, *options, *command]


def is_open_mpi(mpirun: str) -> bool:
    """Return whether the program `mpirun` is that of Open MPI."""
    version = subprocess.run([mpirun, "--version"], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    return "Open MPI" in version.stdout
