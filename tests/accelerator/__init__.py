"""A simulated accelerator with asynchronous streams, for tests of what depends on a device.

It is torch's PrivateUse1 device under a name of the test's choice. Kernels run late, each stream in a thread of its
own; the host cannot read the memory of the device (SIGSEGV), and memory is overwritten when it is allocated again.
`ci/setup` builds it, or `python -m tests.accelerator`.
"""

from __future__ import annotations

import atexit
import hashlib
import importlib.util
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

__all__ = ("build", "missing", "register", "set_delays", "sleep_ms", "synchronous_calls")

_FOLDER = Path(__file__).parent
_TORCH = Path(torch.__file__).parent
_NAME = "simulated_accelerator"
_WITH_TRANSPORT = {"npu": "hccl"}
"""The transport of each device that has one: under this name, torch and dualdist know it."""


def _built() -> Path:
    """Return the place of the extension, which depends on its sources and on torch."""
    digest = hashlib.sha256(f"{torch.__version__} {sys.version}".encode())
    for source in sorted(_FOLDER.glob("*.h")) + sorted(_FOLDER.glob("*.cpp")):
        digest.update(source.read_bytes())
    return Path(sys.prefix, f"{_NAME}-{digest.hexdigest()[:16]}.so")


def missing() -> str | None:
    """Return why tests cannot use the accelerator; None if they can."""
    return (
        None
        if _built().exists()
        else "the simulated accelerator is not built: run ci/setup with a C++ compiler"
    )


def build() -> None:
    """Compile the extension, unless it is built. Without optimization, since that takes half the time."""
    if missing() is None:
        return
    for old in Path(sys.prefix).glob(f"{_NAME}-*"):
        old.unlink()
    include, lib, partial = _TORCH / "include", _TORCH / "lib", _built().with_suffix(".partial")
    folders = [include, include / "torch/csrc/api/include", sysconfig.get_path("include")]
    libraries = ["c10", "torch", "torch_cpu", "torch_python"]
    command = [
        "c++",
        "-std=c++20",
        "-O0",
        "-w",
        "-fPIC",
        "-shared",
        _FOLDER / "accelerator.cpp",
        "-o",
        partial,
    ]
    command += [f"-I{folder}" for folder in folders]
    command += [f"-L{lib}", f"-Wl,-rpath,{lib}", *(f"-l{library}" for library in libraries)]
    subprocess.run(command, check=True)
    partial.rename(_built())


_extension: Any = None


def register(name: str) -> None:
    """Make the accelerator torch's device `name` in this process, once. "npu" has the transport "hccl", others none."""
    global _extension
    spec = importlib.util.spec_from_file_location(_NAME, _built())
    assert spec and spec.loader
    _extension = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(_extension)
    from . import device_module

    device_module.extension = _extension
    torch.utils.rename_privateuse1_backend(name)
    torch._register_device_module(name, device_module)
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    if name in _WITH_TRANSPORT:
        dist.Backend.register_backend(_WITH_TRANSPORT[name], _transport, extended_api=True, devices=[name])
    atexit.register(_extension.end)


def _transport(options: Any, _: Any) -> Any:
    place = options.group_rank, options.group_size
    gloo = dist.ProcessGroupGloo(dist.PrefixStore("simulated", options.store), *place, options.timeout)
    return _extension.transport(*place, gloo)


def set_delays(main: int = 0, side: int = 0, collective: int = 0, seed: int | None = None) -> None:
    """Set the longest random delay before a kernel, in microseconds, by the kind of stream. A third of them have one.

    main: of default streams. collective: of the transport. seed: of the delays on streams that are used later.
    """
    if seed is not None:
        _extension.set_seed(seed)
    _extension.set_delays(main, side, collective)


def sleep_ms(milliseconds: int) -> None:
    """Queue a kernel that takes that long on the current stream."""
    _extension.sleep_ms(milliseconds)


def synchronous_calls() -> dict[str, int]:
    """Return how often each operator made the host wait, since it cannot run late."""
    return dict(_extension.synchronous_calls())
