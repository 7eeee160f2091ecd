"""Launchers that the table lacks: those that a user describes, and marks of any other.

A user describes the launcher of a site by naming its variables.

Marks are variables that only a launched process has, also of launchers that give no rank and size. A process without a
launcher that carries one is one of several processes, and must not train alone. Variables of an allocation or a batch
script (SLURM_JOB_ID, PBS_NODEFILE, LSB_HOSTS, FLUX_URI) are no marks.

Sources: PBS, pbsdsh(1B) (the batch script is task 1, on node 0); LSF, Open MPI 4 orte/mca/ess/lsf/ess_lsf_module.c;
aprun's ALPS_APP_PE, libfabric prov/gni; HPE MPI's MPT_LRANK, https://docs.lammps.org/Run_options.html; MPI_RANKID of
Platform MPI and MPIRUN_RANK, libfabric prov/psm3; hydra and Open MPI, the recorded environments of the
tests; SageMaker, the names in sagemaker-training-toolkit; Kubeflow Trainer 2, pkg/constants/constants.go.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .core.launch.launchers import MPI, OUTERMOST, SITE, Launcher
from .errors import ConfigurationError

NAMED_BY = {
    "rank": "DUALDIST_RANK_FROM",
    "size": "DUALDIST_SIZE_FROM",
    "local_rank": "DUALDIST_LOCAL_RANK_FROM",
    "local_size": "DUALDIST_LOCAL_SIZE_FROM",
}
"""Field of Launcher -> the variable that names the variable with this number."""


def site_launcher(env: Mapping[str, str]) -> Launcher | None:
    """Return the launcher that DUALDIST_RANK_FROM and the others describe, None when none of them is set.

    Raises ConfigurationError when the rank or the size is not named, or a variable that is named is absent.
    """
    names = {field: env[setting] for field, setting in NAMED_BY.items() if env.get(setting)}
    if not names:
        return None
    for field in ("rank", "size"):
        if field not in names:
            present = NAMED_BY[next(iter(names))]
            raise ConfigurationError(
                f"`{NAMED_BY[field]}` must be set beside {present}, but is absent. "
                f"Set it to the name of the variable with the {field}, or unset {present}."
            )
    for field, name in names.items():
        if not env.get(name):
            raise ConfigurationError(
                f"`{name}` must be set, because {NAMED_BY[field]} names it, but is absent. Start with the launcher "
                f"that sets it, unset {NAMED_BY[field]}, or set DUALDIST_LAUNCHER=python to run a single process."
            )
    fields: dict[str, Any] = {**dict.fromkeys(NAMED_BY), **names}
    return Launcher(SITE, markers=(NAMED_BY["rank"],), inside=OUTERMOST, is_command=False, **fields)


_POSITIVE = r"0*[1-9]\d*"


@dataclass(frozen=True)
class Mark:
    """Variables, each of which shows that a launcher started this process."""

    variables: str
    who: str
    """What sets them, in a few words."""
    rows: tuple[str, ...] = ()
    """Launchers of the table whose processes may have them, also because of what started the launcher."""
    value: str = ".+"
    """A regular expression: the values that show it."""
    unless: str = ""
    """NAME=VALUE: this setting shows that there is only one process."""


_TORCH = ("torchrun", "env")
_PMI = ("mpiexec", "mpirun_rsh", "jsrun", "srun", "flux", "PALS")

MARKS = (
    Mark("RANK", "torchrun or a cluster", _TORCH),
    Mark("LOCAL_RANK", "torchrun or a cluster", _TORCH, _POSITIVE),
    Mark("GROUP_RANK", "torchrun", _TORCH, _POSITIVE),
    Mark("NODE_RANK", "a cluster or Ray", _TORCH, _POSITIVE),
    Mark("PET_NODE_RANK PET_MASTER_ADDR PET_RDZV_ENDPOINT", "Kubeflow", _TORCH, unless="PET_NNODES=1"),
    Mark("SM_HOSTS", "SageMaker", (*_TORCH, "mpirun"), ".*,.*"),
    Mark("DUALDIST_RANK DUALDIST_SIZE", "`dualdist run` or spawn", OUTERMOST),
    Mark(
        "OMPI_COMM_WORLD_LOCAL_RANK OMPI_UNIVERSE_SIZE OMPI_MCA_ess_base_vpid", "Open MPI's mpirun", ("mpirun", "jsrun")
    ),
    Mark("JSM_NAMESPACE_LOCAL_RANK", "jsrun", ("jsrun",)),
    Mark("MV2_COMM_WORLD_LOCAL_RANK MPIRUN_RANK", "MVAPICH's mpirun_rsh", ("mpirun_rsh",)),
    Mark("SLURM_PROCID SLURM_LOCALID", "srun", ("srun",), _POSITIVE),
    Mark("SLURM_STEP_TASKS_PER_NODE", "srun", ("srun",)),
    Mark("FLUX_TASK_LOCAL_ID", "flux run", ("flux",)),
    Mark("PALS_LOCAL_RANKID PALS_LOCAL_SIZE PALS_APID", "PALS (HPE Cray's mpiexec)", ("PALS", "srun", "flux")),
    Mark("MPI_LOCALRANKID HYDI_CONTROL_FD", "the mpiexec of MPICH or Intel MPI", _PMI),
    Mark("PMI_LOCAL_RANK PMI_FD PMI_ID PMI_PORT", "an MPI launcher", _PMI),
    Mark("PBS_TASKNUM", "pbsdsh", MPI, r"(?!0*1$).+"),
    Mark("PBS_NODENUM PBS_VNODENUM", "pbsdsh", MPI, _POSITIVE),
    Mark("LSF_PM_TASKID", "LSF's blaunch", MPI),
    Mark("ALPS_APP_PE", "Cray's aprun"),
    Mark("MPT_LRANK", "HPE MPI's mpiexec_mpt"),
    Mark("MPI_RANKID", "Platform MPI's mpirun"),
)


def check_marks(row: Launcher | None, env: Mapping[str, str]) -> None:
    """Raise ConfigurationError when `env`, taken for a world of one, has the mark of another launcher.

    row: the launcher of that world, None for plain python. Marks of launchers that may have started it do not count.
    """
    for mark, variable in [(each, name) for each in MARKS for name in each.variables.split()]:
        text = env.get(variable, "")
        if re.fullmatch(mark.value, text) and not _is_explained(mark, variable, row, env):
            taken = "plain python" if row is None else f"a single process of {row.name}"
            raise ConfigurationError(
                f"`{variable}` must be absent from {taken}, but is {text!r} instead: {mark.who} sets it for each "
                "process that it starts. Name the variables of rank and size in DUALDIST_RANK_FROM and "
                "DUALDIST_SIZE_FROM, or set DUALDIST_LAUNCHER=python to run a single process."
            )


def _is_explained(mark: Mark, variable: str, row: Launcher | None, env: Mapping[str, str]) -> bool:
    if row is not None and variable == "RANK" and env["RANK"].strip("0") == "":
        return True  # the launcher's own number, also set by a container (NVIDIA's Pyxis) or a site's lines
    name, _, value = mark.unless.partition("=")
    if name and env.get(name) == value:
        return True
    return row is not None and not {row.name, *row.inside}.isdisjoint(mark.rows)
