"""What the package uses or changes without being entitled to: private names of others, and state of the whole process.

A new release of torch, Horovod or Python may break each of these without notice. So all lists may only become shorter,
except for what an older release has in place of a public name. test_whole_process.py compares a process.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils import _device

import dualdist

PACKAGE = Path(dualdist.__file__).parent

pytestmark = pytest.mark.only_ci


@functools.cache
def sources() -> dict[str, str]:
    """Return the text of each file of the package."""
    return {str(file.relative_to(PACKAGE)): file.read_text() for file in sorted(PACKAGE.rglob("*.py"))}


@functools.cache
def trees() -> dict[str, ast.Module]:
    return {file: ast.parse(source) for file, source in sources().items()}


def nodes() -> list[tuple[str, ast.AST]]:
    """Return each part of the code with its file."""
    return [(file, node) for file, tree in trees().items() for node in ast.walk(tree)]


PRIVATE_NAMES = {
    "torch": """
        _BaseDataLoaderIter _BatchNorm _C _FR_SELF_RECORDING_BACKENDS _FrameAction _FrameExecStrategy _RecordFunction
        _abort_process_group _active_ddp_module _autograd _buffers _call_end_callbacks_on_jit_fut _cdata
        _current_autograd_node
        _current_graph_task_id _ddp_params_and_buffers_to_ignore _dynamo _execution_engine
        _foreach_copy_ _fsdp_flattened _get_accelerator _get_data_parallel_params _get_default_store _hash_ranks_to_str
        _in_backward_optimizers _load_from_state_dict _metadata _modules _parameters
        _post_accumulate_grad_hooks
        _profiler_enabled _pytree _record_function_with_args_enter _register_fused_optim
        _set_default_timeout _set_params_and_buffers_to_ignore_for_model _set_pg_timeout _shutdown
        _storage_Use_Count _torchdynamo_disable _use_count _values _version
    """,
    "Horovod": "_basics _get_process_set_ids_and_ranks",
    "Python": "_DummyThread _args_from_interpreter_flags _getframe _inheriting _target",
}
"""The private names of others that the package reads, sets or imports, by their owner."""

CALLED_BY_OTHERS = {
    "torch's process groups": """
        _device_types _end_coalescing _set_group_name _source_rank _start_coalescing
    """,
    "programs that use torch's DistributedDataParallel": """
        _check_reducer_finalized _ddp_params_and_buffers_to_ignore _default_broadcast_coalesced
        _get_ddp_logging_data _register_buffer_comm_hook _register_builtin_comm_hook _remove_autograd_hooks
        _set_ddp_sink_clone _set_static_graph
    """,
    "programs that use horovod.torch": """
        _add_process_set_impl _allreduce_delay _handles _process_set_rank _process_set_size _remove_process_set_impl
        _requires_update _should_synchronize
    """,
}
"""The private methods that the package defines without calling them, by who calls them."""


PATCHES = {
    "torch_ddp/module.py": {
        "TorchDataParallel._active_ddp_module = ": "torch.compile asks it for the wrapper whose forward runs",
        "handle.remove()": "torch's hooks would step on gradients of one rank",
    },
    "observation/usage.py": {
        "dataloader._BaseDataLoaderIter.__next__ = ": "once a report is asked for: torch tells no loading times"
    },
    "horovod/backend.py": {"network.cloudpickle = ": "messages of horovodrun name Horovod's modules"},
    "horovod/group.py": {"atexit.unregister(function)": "Horovod's shutdown may wait without an end"},
    "horovod/__init__.py": {"sys.meta_path[:] = ": "compat has the name horovod, which its backend needs"},
    "mpi/transport.py": {"_not_recorded.add(": "torch's flight recorder ends groups that are in Python"},
    "devices/groups.py": {
        "c10d._hash_ranks_to_str = ": "groups that only their members make need equal names",
        "torch_world.group_count = ": "the other ranks do not count such a group",
    },
    "checkpoint/signals.py": {
        "BaseProcess.start = ": "while signals are watched, they must not end the daemonic processes, too"
    },
    "parity/recorder.py": {  # only in processes that `dualdist parity` starts
        "torch.nn.Module.__call__ = ": "torch's hooks do not see keyword arguments",
        "torch.autograd.backward = ": "torch has no hook that sees the loss",
        "hooks.__enter__ = ": "reading what is saved would compute the forward of a checkpoint again",
        "torch.optim.Optimizer.add_param_group = ": "parameters get their hooks before those of a wrapper",
    },
    "compat/torch.py": {"wrapped.__class__ = ": "isinstance() and the state of the optimizer stay"},
    "core/compiling.py": {"frames.set_code_exec_strategy(": "torch.compiler.disable imports Dynamo, which takes long"},
    "mpi/meeting.py": {"sys.exit = ": "MPI must not be finalized after a failure"},
    "core/process.py": {
        "libc.on_exit(": "the same at the end of the process, and Horovod's",
        "Py_IncRef(": "Gloo's destructors wait for a thread, in forks and after failures",
    },
    "core/training/optimizer.py": {"optimizer.__class__ = ": "isinstance() and the state of the optimizer stay"},
}
"""File -> what changes something that code outside of the package sees: a part of the line, and why."""

ACTS = """
    ctypes.CDLL ctypes.CFUNCTYPE faulthandler.enable faulthandler.register gc.disable gc.freeze gc.get_objects
    gc.get_referrers os.register_at_fork os.sched_setaffinity resource.setrlimit signal.pthread_sigmask
    signal.set_wakeup_fd signal.setitimer signal.signal
""".split()
"""What changes the whole process, or looks through it."""

OF_THE_PROCESS = {
    "core/lifecycle.py": {"os.register_at_fork": "a fork must not wait for a thread that it lacks"},
    "core/meeting/server.py": {"resource.setrlimit": "a large world needs more open files, up to the hard limit"},
    "core/process.py": {"ctypes.CDLL": "destructors of C++ in a fork stop its parent: on_exit"},
    "core/world.py": {
        "gc.freeze": "in a fork alone: the same for what the rank would have collected",
        "os.register_at_fork": "a fork must not use the connections of its parent",
    },
    "checkpoint/signals.py": {  # of the signals that CheckpointManager(signals=) names
        "os.register_at_fork": "they reach a child when it has its handlers",
        "signal.pthread_sigmask": "the same",
        "signal.signal": "a checkpoint is saved at a preemption",
    },
    "horovod/group.py": {
        "ctypes.CDLL": "std::set_terminate: Horovod's Gloo aborts the process of a rank that others have left",
        "ctypes.CFUNCTYPE": "the same",
    },
    "mpi/meeting.py": {"ctypes.CDLL": "MPI_Init_thread and MPI_Finalize with a limit of time"},
    "mpi/work.py": {"os.register_at_fork": "a fork must not use MPI"},
    "observation/dump.py": {
        "faulthandler.register": "SIGUSR2, where nobody else takes it, also while the main thread is in C",
        "signal.signal": "in a fork alone: launchers send SIGUSR2 to the whole group",
    },
    "sync_batch_norm.py": {"gc.get_referrers": "finds layers that need another class: an optimizer knows no modules"},
    # Processes of the package's own commands:
    "exec/command.py": {
        "os.sched_setaffinity": "as a launcher binds its processes",
        "signal.signal": "the command behind `dualdist exec` gets the usual handlers",
    },
    "exec/pmi.py": {"ctypes.CDLL": "PMI and PMIx are libraries of C"},
    "parity/command.py": {"signal.signal": "SIGTERM also ends what it has started"},
    "parity/recorder.py": {"faulthandler.register": "the stacks of a run that hangs"},
    "processes/agent.py": {
        "ctypes.CDLL": "prctl: no process outlives its agent",
        "signal.pthread_sigmask": "signals begin when their handlers are there",
        "signal.set_wakeup_fd": "signals wake its loop",
        "signal.setitimer": "its own end has a limit of time",
        "signal.signal": "signals are passed on to the processes",
    },
    "processes/command.py": {
        "signal.set_wakeup_fd": "signals wake the loop of `dualdist run`",
        "signal.signal": "signals are passed on to the agents",
    },
    "processes/job.py": {"signal.pthread_sigmask": "an agent's ssh gets no signals of the terminal"},
    "processes/relay.py": {"ctypes.CDLL": "prctl: a relay ends with its launcher"},
    "shared_memory/mesh.py": dict.fromkeys(
        ["ctypes.CDLL", "os.register_at_fork"], "mmap: what a forked process writes to gradients is its own"
    ),
}
"""File -> what it does of ACTS, and why."""

NO_PATCHES = ("atexit", "mpi4py.rc.finalize", "mpi4py.rc.initialize", "sys.argv")
"""Attributes of other modules that are there to be set; `atexit` is one of weakref.finalize."""


DOCUMENTED = ("_asdict", "_exit", "_fields")
"""Names of Python that are public in spite of their underscore."""


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in ("_", *DOCUMENTED)


def root(node: ast.expr) -> str:
    """Return the name with which an expression such as `name.x(1).y[2]` begins."""
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


@functools.cache
def own_names() -> set[str]:
    """Return the names of the package's functions and classes, and of the attributes of its classes."""
    names = set()
    for _, node in nodes():
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {part.id for line in node.body for part in ast.walk(line) if isinstance(part, ast.Name)}
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and root(node) in ("self", "cls"):
            names.add(node.attr)
    return names


@functools.cache
def torch_names() -> set[str]:
    """Return the attributes of objects of torch that are often at hand."""
    layer = nn.BatchNorm1d(1)
    optimizer = torch.optim.SGD(layer.parameters())
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    objects = (layer, layer.state_dict(), optimizer, scaler, nn.parallel.DistributedDataParallel)
    return {name for one in objects for name in dir(one)}


def is_foreign(name: str, owner: ast.expr) -> bool:
    """Return whether an attribute of `owner` has a private name of others."""
    if not is_private(name):
        return False
    if name not in own_names() or (name in torch_names() and root(owner) not in ("self", "cls")):
        return True
    return isinstance(owner, ast.Attribute) and is_foreign(owner.attr, owner.value)


def uses(node: ast.AST) -> Iterator[str]:
    """Yield the private names of others that a part of the code reads, sets or imports."""
    if isinstance(node, ast.Import):
        yield from (part for alias in node.names for part in alias.name.split(".") if is_private(part))
    elif isinstance(node, ast.ImportFrom) and node.level == 0:
        names = [*str(node.module).split("."), *(alias.name for alias in node.names)]
        yield from filter(is_private, names)
    elif isinstance(node, ast.Attribute) and is_foreign(node.attr, node.value):
        yield node.attr
    elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr", "setattr"):
        owner, name = node.args[0], node.args[1]
        text = name.value if isinstance(name, ast.Constant) else None
        if isinstance(text, str) and is_private(text) and (root(owner) != "self" or is_foreign(text, owner)):
            yield text


def is_listed(found: dict[str, str], listed: list[str]) -> None:
    """Fail unless the names that were found, each with its place, are those that are listed."""
    assert {name: place for name, place in found.items() if name not in listed} == {}, "do without these names"
    assert sorted(set(listed) - found.keys()) == [], "these names are no longer used: take them from the list"


@pytest.mark.only_ci
def test_private_names_of_others_become_fewer() -> None:
    found = {name: f"{file}:{getattr(node, 'lineno', 0)}" for file, node in nodes() for name in uses(node)}
    is_listed(found, [name for names in PRIVATE_NAMES.values() for name in names.split()])


@pytest.mark.only_ci
def test_private_methods_for_others_become_fewer() -> None:
    names = {node.attr for _, node in nodes() if isinstance(node, ast.Attribute)}
    found = {
        method.name: f"{file}:{method.lineno}"
        for file, node in nodes()
        if isinstance(node, ast.ClassDef)
        for method in node.body
        if isinstance(method, ast.FunctionDef) and is_private(method.name) and method.name not in names
    }
    is_listed(found, [name for names in CALLED_BY_OTHERS.values() for name in names.split()])


def patched(tree: ast.Module) -> Iterator[ast.Attribute]:
    """Yield what a module sets of other modules, of functions' defaults, and of objects' classes."""
    imported = {
        (alias.asname or alias.name).partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import) or (isinstance(node, ast.ImportFrom) and node.level == 0)
        for alias in node.names
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
            if root(node) in imported or node.attr in ("__class__", "__defaults__"):
                yield node


@pytest.mark.only_ci
def test_patches_of_the_whole_process_become_fewer() -> None:
    gone = [what for file, listed in PATCHES.items() for what in listed if what not in sources().get(file, "")]
    assert gone == [], "take them from the list"
    for file, tree in trees().items():
        listed = " ".join(PATCHES.get(file, ()))
        for node in patched(tree):
            text = ast.unparse(node)
            assert text in listed or text in NO_PATCHES or node.attr in NO_PATCHES, f"{file}:{node.lineno}: {text}"


@pytest.mark.only_ci
def test_acts_on_the_whole_process_become_fewer() -> None:
    found = {
        f"{file}: {act}": f"{file}:{node.lineno}"
        for file, node in nodes()
        if isinstance(node, ast.Call) and (act := ast.unparse(node.func)) in ACTS
    }
    is_listed(found, [f"{file}: {act}" for file, acts in OF_THE_PROCESS.items() for act in acts])


def test_each_new_tensor_names_its_device() -> None:
    """A script may call torch.set_default_device("cuda"): then `torch.tensor(1)` is there."""
    constructors = {f"torch.{function.__name__}" for function in _device._device_constructors()}
    calls = [(file, node) for file, node in nodes() if isinstance(node, ast.Call)]
    made = [(file, node) for file, node in calls if ast.unparse(node.func) in constructors]
    assert made
    without = [
        f"{file}:{node.lineno}: {ast.unparse(node)}"
        for file, node in made
        if not any(keyword.arg == "device" for keyword in node.keywords)
    ]
    assert without == []
