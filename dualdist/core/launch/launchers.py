"""The table of launchers: the environment variables in which each one gives a process its rank and the world's size.

A new launcher is a row of LAUNCHERS. other_launchers.py has variables that only launched processes have.

Sources: torchrun, https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables; horovodrun,
horovod/runner/gloo_run.py:66; Open MPI, https://docs.open-mpi.org/en/main/tuning-apps/environment-var.html; MPICH and
Intel MPI, hydra's PMI; MVAPICH, its user guide 9.8; LSF's jsrun, JSM_NAMESPACE_* (horovod/runner/util/lsf.py and
Spectrum MPI); Slurm, srun(1) OUTPUT ENVIRONMENT VARIABLES; Flux, flux-environment(7); PALS, its header pals.h;
prterun, PRRTE src/mca/schizo/prte/schizo_prte.c:setup_fork. tests/unit/environments has one environment of each.
"""

from __future__ import annotations

from dataclasses import dataclass

ELASTIC_DIR = "DUALDIST_ELASTIC_DIR"
"""The variable that names the folder of elastic commits."""

DUALDIST_RUN, SPAWN = "dualdist run", "spawn"
OUTERMOST = (DUALDIST_RUN, SPAWN)
"""The launchers of dualdist itself. They pass on no variable of an outer launcher, so all others run inside them."""

SITE = "site"
"""The launcher that the variables DUALDIST_RANK_FROM and others describe (other_launchers.py)."""

NUMBERS = ("rank", "size", "local_rank", "local_size")
"""The fields of Launcher that name a variable with a number of the process."""


@dataclass(frozen=True)
class Launcher:
    """The variables that one launcher sets for its processes."""

    name: str
    rank: str
    """The variable with the rank. The next three have the other numbers, in the order of NUMBERS."""
    size: str | None
    """None: no variable has it, and only MPI can report it."""
    local_rank: str | None
    local_size: str | None
    """None: no variable has it. Then it is not known whether all ranks are on one host, and could meet in a file."""
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
    node_count: str | None = None
    """The variable with the number of nodes. If it is 1, `size` is also the local size."""
    node: str | None = None
    """The variable with this node's number. Then `local_size` lists the sizes of all nodes: 4(x2),3 is 4, 4, 3."""
    init_method: str | None = None
    """Where the processes meet, in the form of torch.distributed."""
    is_command: bool = True
    """Whether `name` is also the name of a program."""
    more: str = ""
    """A regular expression of the other variables that it, or dualdist.compat, sets for its processes."""


_TORCH_NUMBERS = "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"
_SCHEDULERS = ("jsrun", "srun", "flux", "PALS", *OUTERMOST)
MPI = ("mpirun", "mpirun_rsh", "mpiexec", "prterun", "PMIx")

LAUNCHERS = (
    Launcher(
        "torchrun",
        *_TORCH_NUMBERS,
        markers=("TORCHELASTIC_RUN_ID",),
        inside=(*MPI, *_SCHEDULERS, SITE),
        # torchrun hides from its processes that --nnodes is a range. Then it restarts them without --max-restarts, too.
        restarts=("TORCHELASTIC_MAX_RESTARTS", ELASTIC_DIR),
        init_method="env://",
        more=r"MASTER_(ADDR|PORT)|TORCHELASTIC_.*|(GROUP|ROLE)_(RANK|NAME|WORLD_SIZE)",
    ),
    Launcher(
        "horovodrun",
        *("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE"),
        markers=("HOROVOD_RANK", "HOROVOD_SIZE"),
        inside=(*MPI, *_SCHEDULERS, SITE),
        elastic=("HOROVOD_ELASTIC=1",),
        starts_horovod=True,
        more=r"HOROVOD_(GLOO_(RENDEZVOUS|IFACE).*|LOCAL_.*|CROSS_.*|HOSTNAME|CONTROLLER|CPU_OPERATIONS|ELASTIC)",
    ),
    Launcher(
        "jsrun",
        *("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_LOCAL_RANK", "JSM_NAMESPACE_LOCAL_SIZE"),
        markers=("JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_RANK"),
        inside=OUTERMOST,
        starts_mpi=("JSM_NAMESPACE_SIZE",),
    ),
    Launcher(
        "mpirun",
        *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
        markers=("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
        inside=_SCHEDULERS,
        starts_mpi=("OMPI_COMM_WORLD_SIZE",),
        starts_horovod=True,
        more="OMPI_.*",
    ),
    Launcher(
        "mpirun_rsh",
        *("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
        markers=("MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK"),
        inside=_SCHEDULERS,
        starts_mpi=("MV2_COMM_WORLD_SIZE",),
    ),
    Launcher(
        "srun",
        *("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
        markers=("SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS"),
        inside=OUTERMOST,
        starts_mpi=("PMIX_RANK", "PMI_RANK", "PMI_FD", "PMI2_FD"),
        # src/plugins/mpi/pmix/pmixp_info.c:pmixp_info_set
        pmix_namespace="slurm.pmix.",
        node="SLURM_NODEID",
        more="SLURM_STEP_.*",
    ),
    # `flux start`, under another launcher, removes PMI_* and SLURM_* for its batch script (flux-environment(7)).
    Launcher(
        "flux",
        *("FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID", None),
        # It does not say which of several nodes has how many tasks.
        node_count="FLUX_JOB_NNODES",
        markers=("FLUX_TASK_RANK", "FLUX_JOB_SIZE"),
        inside=("jsrun", "srun", "PALS", *OUTERMOST),
        starts_mpi=("PMIX_RANK", "PMI_RANK", "PMI_FD"),
    ),
    # mpiexec and aprun of HPE Cray EX. With `--pmi=pmix`, no variable has the size.
    Launcher(
        "PALS",
        *("PALS_RANKID", "PMI_SIZE", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE"),
        markers=("PALS_RANKID",),
        inside=OUTERMOST,
        # Slurm's plugin cray_shasta (mpi_cray_shasta.c:mpi_p_slurmstepd_task) and Flux's cray-pals.
        set_too_by=("srun", "flux"),
        starts_mpi=("PMIX_RANK", "PMI_RANK"),
        asks_mpi=True,
        is_command=False,
    ),
    Launcher(
        "mpiexec",
        *("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
        markers=("PMI_SIZE", "PMI_RANK"),
        inside=_SCHEDULERS,
        set_too_by=("jsrun", "srun", "flux", "PALS"),
        starts_mpi=("PMI_SIZE",),
        more="PMI.*",
    ),
    # Open MPI's mpirun is prterun and sets PRTE_LAUNCHED, too.
    Launcher(
        "prterun",
        *("PMIX_RANK", None, None, None),
        markers=("PRTE_LAUNCHED",),
        inside=_SCHEDULERS,
        set_too_by=("mpirun",),
        starts_mpi=("PMIX_RANK",),
        asks_mpi=True,
    ),
    Launcher(
        "PMIx",
        *("PMIX_RANK", None, None, None),
        markers=("PMIX_RANK", "PMIX_NAMESPACE"),
        inside=_SCHEDULERS,
        set_too_by=("jsrun", "mpirun", "mpirun_rsh", "srun", "flux", "PALS", "mpiexec", "prterun"),
        starts_mpi=("PMIX_RANK",),
        asks_mpi=True,
        is_command=False,
    ),
    *(
        Launcher(
            name,
            *("DUALDIST_RANK", "DUALDIST_SIZE", "DUALDIST_LOCAL_RANK", "DUALDIST_LOCAL_SIZE"),
            markers=(f"DUALDIST_LAUNCHER={name}",),
            inside=OUTERMOST,
            is_command=False,
            more="DUALDIST_(RENDEZVOUS|SECRET)",
        )
        for name in OUTERMOST
    ),
    # torchrun's variables, set by hand or by a cluster.
    Launcher("env", *_TORCH_NUMBERS, markers=("RANK", "WORLD_SIZE"), init_method="env://", is_command=False),
)
"""Where several launchers report the same numbers, the first row wins."""
