"""Become SCRIPT, in each process of any launcher, with all variables that torchrun would have set:

    srun dualdist exec train.py ARGS
    mpirun -np 4 dualdist exec -m package.train ARGS
    mpiexec -n 4 dualdist exec -- any command

The processes meet first, and agree on an address of rank 0 and on a port that stays reserved until the script listens
on it. A script that uses torch.distributed as under torchrun needs no change. Under torchrun only --bind has effect.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

from ..errors import ConfigurationError
from ..launch.detect import numbers_in
from ..meeting.export import export_environment
from ..types import World


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `dualdist exec`."""
    parser.add_argument(
        "--compat",
        action="store_true",
        help="run the script with dualdist.compat, in which horovod.torch is dualdist",
    )
    parser.add_argument(
        "--bind",
        choices=("none", "gpu", "numa"),
        default="none",
        help="gpu: each process sees one GPU of its own, as cuda:0; numa: it runs on the cores beside its GPU",
    )
    parser.add_argument("-m", action="store_true", dest="is_module", help="the script is a Python module")
    parser.add_argument(
        "command", nargs=argparse.REMAINDER, metavar="SCRIPT [ARG ...] | -- COMMAND [ARG ...]"
    )


def execute(args: argparse.Namespace) -> int:
    """Replace this process by the script. Collective over the launched processes. Returns only after an error."""
    command = _command(args.command, args.is_module, args.compat)
    export_environment(lambda world: _bind(args.bind, world, os.environ))
    # Python ignores these signals; a program that replaces it would inherit that.
    for name in ("SIGPIPE", "SIGXFSZ"):
        signal.signal(getattr(signal, name), signal.SIG_DFL)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.stderr.write(f"dualdist exec: {command[0]!r} cannot be started: {error.strerror}.\n")
        return 127 if isinstance(error, FileNotFoundError) else 126


def _command(given: list[str], is_module: bool, is_compat: bool) -> list[str]:
    is_python = given[:1] != ["--"]
    words = given[not is_python :]
    if not words:
        raise ConfigurationError("A script must be given, but is absent. Write `dualdist exec train.py`.")
    if not is_python:
        if is_module or is_compat:
            raise ConfigurationError(
                "After `--` comes a command, which -m and --compat do not change. Leave them out."
            )
        return words
    options = ["-m", "dualdist.compat"] * is_compat + ["-m"] * is_module
    return [sys.executable, *options, *words]


# The GPU of a process and the cores beside it, found without using a GPU.

_VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")
_NVIDIA = Path("/proc/driver/nvidia/gpus")
"""Has a folder for each GPU, with its PCI address as its name. CUDA numbers equal GPUs in this order."""
_PCI, _NODES = Path("/sys/bus/pci/devices"), Path("/sys/devices/system/node")


def _bind(how: str, world: World, env: Mapping[str, str]) -> dict[str, str]:
    """Return variables that give this process its GPU, or set the CPUs on which it runs."""
    if how == "none":
        return {}
    addresses = sorted(folder.name.lower() for folder in _NVIDIA.glob("*:*"))
    variable = next((name for name in _VISIBLE if env.get(name)), _VISIBLE[0])
    devices = env.get(variable, "").split(",") if env.get(variable) else list(map(str, range(len(addresses))))
    is_alone = len(devices) == 1 and variable in env  # the launcher has given this process its own
    index = 0 if is_alone else world.local_rank
    if index >= len(devices):
        raise ConfigurationError(
            f"`--bind {how}` needs a GPU for each process, but {socket.gethostname()} has {len(devices)} for "
            f"{world.local_size} processes ({variable}={env.get(variable, 'not set')}). Start fewer processes there, "
            f"set {variable} to the GPUs, or leave --bind out."
        )
    device = devices[index]
    if how == "gpu":
        return {variable: device}
    if not device.isdecimal() or int(device) >= len(addresses):
        raise ConfigurationError(
            f"`--bind numa` needs the number of one of {len(addresses)} NVIDIA GPUs, but {variable} has {device!r} "
            "instead. Use the binding of your launcher (srun --cpu-bind, mpirun --bind-to)."
        )
    # As `torchrun --numa-binding=node` (torch/numa/binding.py): without a node, the first one.
    node = max(0, numa_node(addresses[int(device)]))
    cpus = cores_by_node().get(node, set()) & os.sched_getaffinity(0)
    if not cpus:
        raise ConfigurationError(
            f"`--bind numa` needs CPUs of NUMA node {node}, beside GPU {device}, but the launcher has bound this "
            "process to others. Leave its binding out (mpirun --bind-to none, srun --cpu-bind=none)."
        )
    os.sched_setaffinity(0, cpus)
    return {}


def numa_node(address: str) -> int:
    """Return the NUMA node of the device with this PCI address; -1 if the kernel knows none."""
    file = _PCI / address / "numa_node"
    return int(file.read_text()) if file.exists() else -1


def cores_by_node() -> dict[int, set[int]]:
    """Return the CPUs of each NUMA node of this host."""
    files = _NODES.glob("node[0-9]*/cpulist")
    return {
        int(file.parent.name[len("node") :]): set(map(int, numbers_in(file.read_text().strip())))
        for file in files
    }
