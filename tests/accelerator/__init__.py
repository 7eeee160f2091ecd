"""A simulated accelerator with asynchronous streams, for tests of what depends on a device.

It is torch's device PrivateUse1 under a name of the test's choice. Kernels run late, in a thread for each stream. The
host cannot read the memory of the device (SIGSEGV), and memory is overwritten when it is allocated again.
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
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

_NAME = "simulated_accelerator"
_SOURCES = sorted(path for path in Path(__file__).parent.iterdir() if path.suffix in (".h", ".cpp"))
_extension: Any = None


def _built() -> Path:
    """Return the place of the extension. It depends on the sources, torch and Python."""
    content = f"{torch.__version__} {sys.version}".encode() + b"".join(map(Path.read_bytes, _SOURCES))
    return Path(sys.prefix, f"{_NAME}-{hashlib.sha256(content).hexdigest()[:16]}.so")


def missing() -> str | None:
    """Return why tests cannot use the accelerator; None if they can."""
    return None if _built().exists() else "the simulated accelerator is not built: ci/setup needs a C++ compiler"


def build() -> None:
    """Compile the extension unless it is there. Without optimization: the kernels are torch's own."""
    built, torch_folder = _built(), Path(torch.__file__).parent
    if built.exists():
        return
    for old in built.parent.glob(f"{_NAME}-*"):
        old.unlink()
    headers = (torch_folder / "include", torch_folder / "include/torch/csrc/api/include", sysconfig.get_path("include"))
    command = ["c++", "-std=c++20", "-O0", "-w", "-fPIC", "-shared", *(f"-I{folder}" for folder in headers)]
    command += [str(path) for path in _SOURCES if path.suffix == ".cpp"]
    command += [f"-L{torch_folder / 'lib'}", f"-Wl,-rpath,{torch_folder / 'lib'}"]
    command += ["-lc10", "-ltorch", "-ltorch_cpu", "-ltorch_python", "-o", f"{built}.part"]
    subprocess.run(command, check=True)
    Path(f"{built}.part").rename(built)


def register(name: str) -> None:
    """Make the accelerator torch's device `name` in this process, once. "npu" has the transport "hccl", others none."""
    global _extension
    spec = importlib.util.spec_from_file_location(_NAME, _built())
    assert spec is not None and spec.loader is not None
    _extension = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(_extension)
    atexit.register(_extension.end)
    torch.utils.rename_privateuse1_backend(name)
    torch._register_device_module(name, _device_module(name))
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    if name == "npu":  # torch and dualdist know this transport of devices called so
        dist.Backend.register_backend("hccl", _transport, extended_api=True, devices=[name])


def _device_module(name: str) -> ModuleType:
    """Return torch's module for the device, as torch.cuda is for CUDA."""
    accelerator, generator, module = torch.accelerator, _extension.generator, ModuleType(f"torch.{name}")
    vars(module).update(
        Event=torch.Event,
        Stream=torch.Stream,
        current_device=accelerator.current_device_index,
        current_stream=accelerator.current_stream,
        device=lambda device: accelerator.device_index(torch.device(device).index),
        device_count=lambda: _extension.devices,
        get_amp_supported_dtype=lambda: [torch.float16, torch.bfloat16],
        get_device_name=lambda device=None: "simulated",
        get_device_properties=lambda index: SimpleNamespace(uuid=f"simulated-{index}", total_memory=1 << 32),
        get_rng_state=lambda device=None: generator.get_state(),
        initial_seed=generator.initial_seed,
        is_available=lambda: True,
        is_initialized=_extension.is_initialized,
        manual_seed=generator.manual_seed,
        manual_seed_all=generator.manual_seed,
        set_device=accelerator.set_device_index,
        set_rng_state=lambda state, device=None: generator.set_state(state),
        stream=lambda stream: stream,
        synchronize=accelerator.synchronize,
        _is_in_bad_fork=lambda: False,
    )
    return module


def _transport(options: Any, _: Any) -> Any:
    store, place = dist.PrefixStore("simulated", options.store), (options.group_rank, options.group_size)
    return _extension.transport(*place, dist.ProcessGroupGloo(store, *place, options.timeout))


def set_delays(main: int = 0, side: int = 0, collective: int = 0, seed: int = 0) -> None:
    """Set the longest random delay before a kernel, in microseconds, for each kind of stream. A third of them have one.

    main: of default streams. side: of others. collective: of the transport. seed: of streams that are used later.
    """
    _extension.set_delays(main, side, collective, seed)


def sleep_ms(milliseconds: int) -> None:
    """Queue a kernel that takes so long on the current stream."""
    _extension.sleep_ms(milliseconds)
