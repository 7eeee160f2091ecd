"""Become SCRIPT, in each process of any launcher, with all variables that torchrun would have set:

    srun dualdist exec train.py ARGS
    mpirun -np 4 dualdist exec -m package.train ARGS
    mpiexec -n 4 dualdist exec -- any command

The processes meet first, and agree on an address of rank 0 and on a port that stays reserved until the script listens
on it. A script that uses torch.distributed as under torchrun needs no change. Under torchrun only --bind has effect.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

from ..core.types import World
from ..errors import ConfigurationError
from ..slurm import numbers_in
from . import export_environment


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `dualdist exec`."""
    add = parser.add_argument
    text = "run the script with dualdist.compat, in which horovod.torch is dualdist"
    add("--compat", action="store_true", help=text)
    text = "gpu: each process sees one GPU of its own, as cuda:0; numa: it runs on the cores beside its GPU"
    add("--bind", choices=("none", "gpu", "numa"), default="none", help=text)
    add("-m", action="store_true", dest="is_module", help="the script is a Python module")
    add("-u", action="store_true", help="as Python's, and always on: output is not buffered")
    words = "SCRIPT [ARG ...] | -m MODULE [ARG ...] | -- COMMAND [ARG ...]"
    add("command", nargs=argparse.REMAINDER, metavar=words)
    parser.usage = f"dualdist exec [OPTIONS] {words}\nOptions of Python: dualdist exec -- python -O train.py"


def execute(args: argparse.Namespace) -> int:
    """Replace this process by the script. Collective over the launched processes. Returns only after an error."""
    command = _command(args.command, args.is_module, args.compat)

    def prepare(world: World) -> dict[str, str]:
        script = args.command[0]
        if not (args.is_module or script in ("-", "--") or os.path.exists(script)):
            raise ConfigurationError(
                f"A script must be a file on every host, but {script!r} is none on {socket.gethostname()}. Give its "
                f"path, or write `dualdist exec -- {script}` for a command."
            )
        return {} if args.bind == "none" else _bind(args.bind, world, os.environ)

    export_environment(prepare)
    # As torchrun's -u, also for a command: output in a buffer is late, and lost if the process is killed. And a process
    # that hangs or crashes writes its stacks when SIGABRT or an error ends it.
    for name in ("PYTHONUNBUFFERED", "PYTHONFAULTHANDLER"):
        os.environ[name] = os.environ.get(name) or "1"
    # Python ignores these signals; a program that replaces it would inherit that.
    for name in ("SIGPIPE", "SIGXFSZ"):
        signal.signal(getattr(signal, name), signal.SIG_DFL)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.stderr.write(f"dualdist exec: {command[0]!r} cannot be started: {error.strerror}.\n")
        return 127 if isinstance(error, FileNotFoundError) else 126


def _command(given: list[str], is_module: bool, is_compat: bool) -> list[str]:
    is_command = given[:1] == ["--"]
    words = given[is_command:]
    if not words:
        raise ConfigurationError("A script must be given, but is absent. Write `dualdist exec train.py`.")
    if is_command and (is_module or is_compat):
        raise ConfigurationError("After `--` comes a command, which -m and --compat do not change. Leave them out.")
    options = ["-m", "dualdist.compat"] * is_compat + ["-m"] * is_module
    return words if is_command else [sys.executable, *options, *words]


# The GPU of a process and the cores beside it, found without using a GPU.

_NVIDIA = Path("/proc/driver/nvidia/gpus")
"""Has a folder for each GPU, with its PCI address as its name. CUDA numbers equal GPUs in this order."""
_AMD = Path("/sys/class/kfd/kfd/topology/nodes")
"""Has a folder for each CPU and GPU (libhsakmt, src/topology.c)."""
_PCI, _NODES = Path("/sys/bus/pci/devices"), Path("/sys/devices/system/node")
_Gpus = list[tuple[str, str]]  # PCI address and UUID of each; "" if unknown


def _kinds() -> list[tuple[tuple[str, ...], _Gpus]]:
    """Return for each kind of GPU the variables that select some of them, and the GPUs if the kernel lists them."""
    texts = [(folder.name.lower(), _text(folder / "information")) for folder in sorted(_NVIDIA.glob("*:*"))]
    nvidia = [(name, "".join(re.findall(r"UUID:\s+(GPU-[\da-f-]+)\s", text))) for name, text in texts]
    amd = [("", "") for file in _AMD.glob("*/gpu_id") if _text(file).strip() not in ("", "0")]
    return [
        (("CUDA_VISIBLE_DEVICES",), nvidia),
        # HIP reads the first one that is set of the first two, and counts within what the last one leaves.
        (("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"), amd),
        (("ZE_AFFINITY_MASK",), []),
        (("ASCEND_RT_VISIBLE_DEVICES",), []),
    ]


def _text(file: Path) -> str:
    """Return the text of `file`, "" if it cannot be read, as that of another container's GPU."""
    with contextlib.suppress(OSError):
        return file.read_text("latin-1")
    return ""


def _bind(how: str, world: World, env: Mapping[str, str]) -> dict[str, str]:
    """Return variables that give this process its GPU, or set the CPUs on which it runs."""
    kinds = _kinds()
    named = [kind for kind in kinds if env.keys() & {*kind[0]}]  # Slurm may set variables of several kinds
    own = [_own(*kind, world, env) for kind in [kind for kind in kinds if kind[1]] or named or kinds[:1]]
    if how == "gpu":
        return {variable: device for variable, device, _ in own}
    variable, device, address = own[0]
    if not address:
        raise ConfigurationError(
            f"`--bind numa` needs the number or UUID of an NVIDIA GPU, but {variable} has {device!r} instead. "
            "Use the binding of your launcher (srun --cpu-bind, mpirun --bind-to)."
        )
    # As `torchrun --numa-binding=node` (torch/numa/binding.py): without a node, the first one.
    node = max(0, numa_node(address))
    cpus = cores_by_node().get(node, set()) & os.sched_getaffinity(0)
    if not cpus:
        raise ConfigurationError(
            f"`--bind numa` needs CPUs of NUMA node {node}, beside GPU {device}, but the launcher has bound this "
            "process to others. Leave its binding out (mpirun --bind-to none, srun --cpu-bind=none)."
        )
    os.sched_setaffinity(0, cpus)
    return {}


def _own(names: tuple[str, ...], gpus: _Gpus, world: World, env: Mapping[str, str]) -> tuple[str, str, str]:
    """Return a variable of `names`, its value for this process, and the address of that GPU, "" if unknown."""
    variable = next((name for name in names if name in env), names[0])
    if gpus and variable != names[-1] in env:
        gpus = gpus[: len(_visible(env[names[-1]], gpus))]
    text = env.get(variable, ",".join(map(str, range(len(gpus)))))
    visible = [*_visible(text, gpus).items()]
    is_alone = variable in env and "," not in text  # the launcher has given this process its own
    index = 0 if is_alone else world.local_rank
    if index >= len(visible):
        raise ConfigurationError(
            f"`--bind` needs a GPU for each process, but {socket.gethostname()} has {len(visible)} for "
            f"{world.local_size} processes ({variable}={env.get(variable, 'not set')}). Start fewer processes there, "
            f"set {variable} (Intel: ZE_AFFINITY_MASK, Ascend: ASCEND_RT_VISIBLE_DEVICES), or leave --bind out."
        )
    place, device = visible[index]
    return variable, device, gpus[place][0] if isinstance(place, int) else ""


def _visible(text: str, gpus: _Gpus) -> dict[int | str, str]:
    """Return the names of GPUs in `text` that a process sees, by their place in `gpus`, or by name if that is unknown.

    As in CUDA, the beginning of a UUID is enough, a name that is not valid hides itself and all after it, and one that
    comes twice hides all (CUDA Programming Guide; torch/cuda/__init__.py, `_parse_visible_devices`).
    """
    found: dict[int | str, str] = {}
    has_uuids = bool(gpus) and all(uuid for _, uuid in gpus)
    unlisted = "MIG-.+" if has_uuids else "(MIG|GPU)-.+" + r"|\d+(\.\d+)?" * (not gpus)
    for name in map(str.strip, text.split(",")):
        begun = [n for n, (_, uuid) in enumerate(gpus) if name[4:] and uuid.startswith(name)]
        places = begun or [n for n in range(len(gpus)) if name == str(n)]
        if len(places) != 1 and not re.fullmatch(unlisted, name):
            break
        place = places[0] if len(places) == 1 else name
        if place in found:
            return {}
        found[place] = name
    return found


def numa_node(address: str) -> int:
    """Return the NUMA node of the device with this PCI address; -1 if the kernel knows none."""
    return int(_text(_PCI / address / "numa_node") or -1)


def cores_by_node() -> dict[int, set[int]]:
    """Return the CPUs of each NUMA node of this host."""
    return {
        int(file.parent.name[len("node") :]): set(map(int, numbers_in(file.read_text().strip())))
        for file in _NODES.glob("node[0-9]*/cpulist")
    }
