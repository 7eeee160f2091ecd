"""The hosts that a resource manager has allocated to the job in which `dualdist run` was started."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ..errors import ConfigurationError
from ..launch.slurm_lists import host_names, node_counts
from .hosts import Host, merged, parse_host

__all__ = ("Allocation", "find_allocation")


@dataclass(frozen=True)
class Allocation:
    """The hosts of a job."""

    variable: str
    """The variable of the environment that names them, or the job."""
    hosts: list[Host]
    """Each host once, with the number of processes for which it was allocated."""


_FLUX_SECONDS = 30.0
_SLURM_COUNTS = ("SLURM_TASKS_PER_NODE", "SLURM_JOB_CPUS_PER_NODE")
"""Slurm's variables with a number for each node: of tasks, else of CPUs."""


def find_allocation(env: Mapping[str, str]) -> Allocation | None:
    """Return the allocation that `env` describes; None outside one. Raises ConfigurationError if it cannot be read."""
    for variable, read in _READERS.items():
        text = env.get(variable, "")
        if text:
            try:
                hosts = merged(read(text, env))
                if not hosts:
                    raise ValueError("it names none")
            except (OSError, ValueError, LookupError, subprocess.TimeoutExpired) as error:
                raise ConfigurationError(
                    f"`{variable}` must name the hosts of this job, but is {text!r} instead: {error}. "
                    "Give the hosts with -H or --hostfile."
                ) from error
            for host in hosts:
                parse_host(host.name, variable)
            return Allocation(variable, hosts)
    return None


def _slurm(nodes: str, env: Mapping[str, str]) -> list[Host]:
    """Read node[1-2], with the tasks of each node, or its CPUs (sbatch(1), output environment variables)."""
    names = host_names(nodes)
    counts = next(filter(None, (node_counts(env.get(name, "")) for name in _SLURM_COUNTS)), [1] * len(names))
    if len(counts) != len(names):
        raise ValueError(f"there are {len(counts)} numbers of tasks for {len(names)} nodes")
    return [Host(*pair) for pair in zip(names, counts, strict=True)]


def _host_per_slot(file: str, _: Mapping[str, str]) -> list[Host]:
    """Read a file with a line for each slot (pbs_environment(7); LSF's documentation of LSB_DJOB_HOSTFILE)."""
    return [Host(name, 1) for name in Path(file).read_text().split()]


def _pairs(text: str, _: Mapping[str, str]) -> list[Host]:
    """Read host1 4 host2 2 (LSF's documentation of LSB_MCPU_HOSTS)."""
    words = text.split()
    return [Host(name, int(count)) for name, count in zip(words[::2], words[1::2], strict=True)]


def _grid_engine(file: str, _: Mapping[str, str]) -> list[Host]:
    """Read lines of host, slots, queue and processors (sge_pe(5))."""
    rows = [line.split() for line in Path(file).read_text().splitlines() if line.strip()]
    if any(len(row) < 2 for row in rows):
        raise ValueError("a line has no number of slots")
    return [Host(row[0], int(row[1])) for row in rows]


def _flux(_: str, env: Mapping[str, str]) -> list[Host]:
    """Return the hosts of the Flux instance of `env` with their numbers of cores (flux-resource(1), Flux RFC 20)."""
    command = ["flux", "resource", "R"]
    ended = subprocess.run(
        command, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_FLUX_SECONDS
    )
    if ended.returncode:
        raise ValueError(f"`{' '.join(command)}` failed: {ended.stderr.strip()}")
    execution = json.loads(ended.stdout)["execution"]
    cores = {
        rank: len(_numbers(row["children"]["core"]))
        for row in execution["R_lite"]
        for rank in _numbers(row["rank"])
    }
    names = [name for entry in execution["nodelist"] for name in host_names(entry)]
    # The nodes are in the order of their brokers' ranks (flux/resource/Rv1Set.py of flux-core 0.88).
    return [Host(name, cores[rank]) for name, rank in zip(names, sorted(cores), strict=True)]


def _numbers(idset: str) -> list[int]:
    """Read 0-2,5 (Flux RFC 22)."""
    return [int(number) for number in host_names(f"[{idset.strip('[]')}]")]


_READERS: Mapping[str, Callable[[str, Mapping[str, str]], Iterable[Host]]] = {
    "SLURM_JOB_NODELIST": _slurm,
    "PBS_NODEFILE": _host_per_slot,
    "LSB_DJOB_HOSTFILE": _host_per_slot,
    "LSB_MCPU_HOSTS": _pairs,
    "PE_HOSTFILE": _grid_engine,
    "COBALT_NODEFILE": _host_per_slot,
    "FLUX_URI": _flux,
}
"""The variable that names the hosts -> what reads it."""
