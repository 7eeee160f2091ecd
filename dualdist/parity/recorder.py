"""Runs a training script inside each process of `dualdist parity`, and writes what it computed to a file.

    python -m dualdist.parity.recorder FOLDER STEPS SIZE BACKEND SIGNAL -- [-m] SCRIPT ARGS

The script is not changed, nor are its numbers: nothing here calls a collective or draws a random number. Hooks of
torch see each forward of a whole model, each backward and each step of an optimizer. A tensor is recorded as a
fingerprint: a hash, the norm, and a sketch. The difference of sketches has on average the norm of the difference, and
the sketch of a sum is the sum of the sketches.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import hashlib
import importlib
import inspect
import json
import math
import os
import random
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import dualdist

from ..checkpoint.contents import without_wrappers
from ..compat import install
from ..compat.__main__ import run
from ..core.backends import HOROVOD_BACKENDS
from ..core.collectives.wire import dtype_name
from ..core.launch import detect
from .records import WIDTH

_LEAVE_SECONDS = 30
"""How long a rank that has recorded all steps waits for the others: one that leaves could break their last step."""


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values as a vector on the CPU."""
    values = tensor.detach()
    values = values.to_local() if hasattr(values, "to_local") else values
    values = (values if values.layout == torch.strided else values.to_dense()).resolve_conj().resolve_neg()
    values = values.cpu().contiguous()
    return values.as_strided((values.numel(),), (1,))  # also of one expanded number, whose stride is 0


def fingerprint(tensor: torch.Tensor, finds_narrow: bool = False) -> list[Any]:
    """Return [hash, norm, sketch, dtype and shape], and the 16-bit dtype that could hold all values, or None."""
    flat = _flat(tensor)
    kind = f"{dtype_name(flat.dtype)}{list(tensor.shape)}"
    known = hashlib.blake2b(kind.encode(), digest_size=8)
    known.update(flat.view(torch.uint8).numpy().data)
    # In numpy, whose operations on small arrays are the fastest, and use one thread.
    real = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
    numbers = (real if real.dtype == torch.float32 else real.double()).numpy().astype(numpy.float64)
    signed = numpy.zeros(-(-len(numbers) // WIDTH) * WIDTH)
    with numpy.errstate(all="ignore"):  # of numbers that are not finite
        numpy.multiply(numbers, _signs(len(numbers)), out=signed[: len(numbers)])
        norm = math.sqrt(numpy.dot(numbers, numbers))
        found = [known.hexdigest(), norm, signed.reshape(WIDTH, -1).sum(1).tolist(), kind]
    return [*found, _narrow(flat) if finds_narrow else None]


@functools.cache
def _signs(count: int) -> Any:
    """Return the same pseudo-random signs in every process, without a random generator."""
    mixed: Any = numpy.arange(1, count + 1, dtype=numpy.uint64) * 0x9E3779B1 % 2**32
    mixed = (mixed ^ (mixed >> 15)) * 0x85EBCA6B % 2**32
    return ((mixed >> 16) % 2).astype(numpy.int8) * 2 - 1


def _rows(tensor: torch.Tensor) -> list[str]:
    """Return a hash of each sample of a batch."""
    rows = numpy.array_split(_flat(tensor).view(torch.uint8).numpy(), len(tensor))
    return [hashlib.blake2b(row.data, digest_size=6).hexdigest() for row in rows]


def _narrow(values: torch.Tensor) -> str | None:
    first = values[:1000] if values.dtype == torch.float32 else values[:0]
    names = ("bfloat16", "float16") if first.count_nonzero() else ()
    return next((name for name in names if torch.equal(first.to(getattr(torch, name)).float(), first)), None)


def _tensors(value: Any, path: str = "input") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors inside the arguments of a forward."""
    if isinstance(value, torch.Tensor) and not value.is_meta and value.layout is not torch.jagged:
        yield path, value
    items = enumerate(value) if isinstance(value, list | tuple) else ()
    for key, item in value.items() if isinstance(value, dict) else items:
        yield from _tensors(item, f"{path}.{key}")


def _random_states() -> dict[str, str]:
    of_numpy: Any = numpy.random.get_state()
    states: dict[str, Any] = {
        "torch": torch.get_rng_state().numpy(),
        "python": numpy.array(random.getstate()[1]),
        "numpy": numpy.append(*of_numpy[1:3]),
    }
    if torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state().numpy()
    return {name: hashlib.blake2b(state, digest_size=8).hexdigest() for name, state in states.items()}


_BRANCHES = re.compile("Relu|Threshold|Hardtanh|Abs")
"""The operations whose gradient depends on the sign of what they have saved. Others save whole numbers: indices."""


@functools.cache
def _saved(kind: type) -> list[tuple[str, bool]]:
    """Return the names of what autograd saves for an operation, and whether it is a tensor."""
    names = [name.removeprefix("_saved_") for name in dir(kind) if name.startswith("_saved_")]
    return [(name, hasattr(kind, f"_raw_saved_{name}")) for name in names]


def _nodes(starts: Sequence[Any], ends: Iterable[Any]) -> Iterator[Any]:
    """Yield the operations of a graph of autograd from `starts` back to `ends`, which are not part of it."""
    seen = {None, *ends}
    nodes = [node for node in starts if node not in seen]
    for node in nodes:  # grows
        if node not in seen:
            yield node
            nodes += [before for before, _ in node.next_functions]
            seen.add(node)


def _operations(
    loss: torch.Tensor, outputs: Sequence[Any], reads_tensors: bool
) -> tuple[list[Any], dict[str, Any], dict[str, Any]]:
    """Return what has computed `loss`, the last operation first: of each the name and its numbers; the targets, and
    the branches that each has taken. See "Saved tensors" on https://docs.pytorch.org/docs/stable/notes/autograd.html.
    An operation without a name stands before those of the model's `outputs`.
    """
    found: list[Any] = []
    targets: dict[str, Any] = {}
    branches: dict[str, Any] = {}
    for node in [*_nodes([loss.grad_fn], outputs), None, *_nodes(outputs, [])]:
        if node is None:
            found.append(["", {}])
            continue
        operation = node.name().rpartition("::")[2].removesuffix("0").removesuffix("Backward")
        numbers: dict[str, Any] = {}
        kind: Any = type(node)
        for name, is_tensor in _saved(kind):
            if is_tensor and not reads_tensors:
                continue
            with contextlib.suppress(Exception):  # nothing here may end a training
                value = getattr(node, f"_saved_{name}")
                if isinstance(value, bool | int | float):
                    numbers |= {name: value} if value < 2**63 else {}  # which stands for a negative number
                elif not isinstance(value, torch.Tensor) or value.layout != torch.strided or value.is_complex():
                    continue
                elif name == "target":
                    targets[operation] = fingerprint(value)
                elif value.dim() == 0 and not value.requires_grad:
                    numbers[name] = value.item()
                elif name in ("self", "result") and _BRANCHES.search(operation):
                    branches[f"{len(found)}:{operation}"] = fingerprint(value > 0)
                elif not value.is_floating_point():
                    branches[f"{len(found)}:{operation}.{name}"] = fingerprint(value)
        found.append([operation, numbers])
    return found, targets, branches


def _summing_error(values: torch.Tensor) -> float:
    """Return by how much a sum of float32 numbers changes with their order, relative to the sum of their sizes."""
    numbers = _flat(values)[:100_000].float().numpy()
    with numpy.errstate(all="ignore"):
        total = float(numpy.abs(numbers).sum())
        sums = [float(order.cumsum()[-1]) for order in (numbers, numbers[::-1], numpy.sort(numbers))]
    return (max(sums) - min(sums)) / total if 0 < total < math.inf else 0.0


_COLLECTIVE = re.compile(
    r"(grouped_|sparse_)?(all_?reduce|all_?gather|broadcast|reduce_?scatter|all_?to_?all)\w*|reduce|gather\w*|scatter\w*"
    r"|barrier|join"
)
"""The functions of dualdist, horovod.torch and torch.distributed that are collectives."""
_SHOWN = ("name", "op", "average", "root_rank", "src", "dst")
"""Their arguments that are recorded, besides tensors."""
_WRAPPERS = ("dualdist.", "horovod.")
"""Where optimizers are defined that stand for others."""
_NO_SETTINGS = ("param_names", "foreach", "fused", "capturable", "differentiable")
"""Entries of an optimizer's group that are no settings, or change no more than the last digit."""


def _while_training(record: Callable[..., None]) -> Callable[..., None]:
    """Let the method do nothing after the last step, and while compiling."""

    @functools.wraps(record)
    def recorded(self: Recorder, *args: Any) -> None:
        if not self.has_ended and not torch.compiler.is_compiling():
            record(self, *args)

    return recorded


class Recorder:
    """Follows the training of this process, and ends it after `steps` steps."""

    def __init__(self, folder: Path, steps: int, rank: int, size: int) -> None:
        self.folder, self.steps, self.rank, self.size = folder, steps, rank, size
        self.record: dict[str, Any] = {"rank": rank, "steps": 0, "values": [], "summing_error": 0.0}
        """What is written. `values`: see records.py."""
        self.params: dict[int, torch.Tensor] = {}
        """The parameters of optimizers by their ids; `names` has the names of those that a module has."""
        self.names: dict[int, str] = {}
        self.roots: list[torch.nn.Module] = []
        self.depth = self.step_depth = self.forwards = self.backwards = self.collectives = 0
        self.has_begun = self.in_backward = self.has_backward = self.has_ended = False
        self.own: dict[str, Any] = {}
        self.weights: dict[int, Any] = {}
        """The weights after the last step."""
        self.early: dict[int, Any] = {}
        """The weights before the first step without a backward."""
        self.root: torch.nn.Module | None = None
        """The whole model, in its forward."""
        self.outputs: list[Any] = []
        """The operations that its outputs are of."""
        self.dtypes: dict[int, str] = {}
        self.narrow: dict[int, str | None] = {}
        self.states: dict[str, str] = {}
        """Of random generators, before the first forward since the last backward."""
        self.reads_saved = True
        """Not where a script has hooks on saved tensors: they may compute a forward again."""

    def add(self, stage: str, values: dict[str, Any], number: int = 0, steps_ago: int = 0) -> None:
        step = self.record["steps"] if self.has_begun else -1
        self.record["values"].append([max(-1, step - steps_ago), stage, number, values])

    def watch(self, tensors: Iterable[torch.Tensor]) -> None:
        """Record the gradients of parameters that an optimizer is given."""
        for tensor in tensors:
            if id(tensor) not in self.params:
                self.params[id(tensor)] = tensor
                if tensor.requires_grad:
                    # Not changed by the hooks that reduce: autograd passes what this process has computed.
                    tensor.register_hook(functools.partial(self.see_gradient, id(tensor)))

    def prints(self, params: Iterable[torch.Tensor]) -> dict[int, Any]:
        return {id(param): fingerprint(param) for param in params}

    def named(self, values: dict[int, Any]) -> dict[str, Any]:
        return {self.name(key): value for key, value in values.items()}

    def name(self, key: int) -> str:
        return self.names.get(key) or f"parameter {list(self.params).index(key)}"

    def buffers(self) -> dict[str, Any]:
        named = [pair for root in self.roots for pair in root.named_buffers()]
        return {without_wrappers(name): fingerprint(buffer) for name, buffer in named}

    def begin(self, root: torch.nn.Module | None) -> None:
        """Record the names in a new model, and the weights and buffers with which training begins."""
        if root is not None and not any(root is known for known in self.roots):
            self.roots.append(root)
            for name, tensor in root.named_parameters():
                short = without_wrappers(name)
                taken = short in self.names.values()
                self.names.setdefault(id(tensor), f"{len(self.roots)}:{short}" if taken else short)
        if self.params and not self.has_begun:
            self.add("weights before an early step", self.named(self.early))
            self.add("initial weights", self.named(self.prints(self.params.values())))
            self.add("initial buffers", self.buffers())
            self.has_begun = True

    @_while_training
    def see_collective(self, function: Callable[..., Any], arguments: dict[str, Any]) -> None:
        shown = [f"{name}={value}" for name, value in arguments.items() if name in _SHOWN]
        shown += [f"{dtype_name(it.dtype)}{list(it.shape)}" for _, it in _tensors(arguments)]
        text = f"{function.__name__}({', '.join(shown)})"
        # Until the next forward, it belongs to the step before.
        self.add("collective", {"": text}, self.collectives, steps_ago=int(self.forwards == 0))
        self.collectives += 1

    @_while_training
    def see_forward(self, module: torch.nn.Module, arguments: Any) -> None:
        self.depth += 1
        is_training = self.depth == 1 and torch.is_grad_enabled() and not self.in_backward
        if is_training and next(module.parameters(), None) is not None:  # a loss has none
            self.begin(module)
            weights = self.prints(self.params.values()) if self.forwards == 0 else {}
            if any(self.weights.get(key, known) != known for key, known in weights.items()):
                self.add("weights before the forward", self.named(weights))
            self.collectives *= self.forwards > 0
            batch = dict(_tensors(arguments))
            prints = {path: fingerprint(tensor) for path, tensor in batch.items()}
            self.add("batch", prints, self.forwards)
            rows = (_rows(tensor) for tensor in batch.values() if tensor.dim() and 0 < len(tensor) < 10_000)
            self.add("samples", {"": next(rows, [])}, self.forwards)
            self.states = self.states or _random_states()
            self.root = module
            self.forwards += 1

    @_while_training
    def see_forward_end(self, module: torch.nn.Module, output: Any) -> None:
        self.depth = max(0, self.depth - 1)
        tensors = dict(_tensors(output, ""))
        self.dtypes.update({id(module): dtype_name(tensor.dtype) for tensor in [*tensors.values()][:1]})
        if module is self.root and self.depth == 0:
            layers = {without_wrappers(name): self.layer(made) for name, made in module.named_modules()}
            self.add("layers", layers, self.forwards - 1)
            found = {path: fingerprint(tensor) for path, tensor in tensors.items()}
            self.add("output of the model", found, self.forwards - 1)
            self.root = None
            self.outputs = [tensor.grad_fn for tensor in tensors.values() if tensor.grad_fn is not None]

    def layer(self, module: torch.nn.Module) -> str:
        """Return what makes a layer compute what it does, besides its weights."""
        own = [type(module).__name__ + re.sub(r",? ?inplace=\w+", "", f"({module.extra_repr()})")]
        own = own if next(module.children(), None) is None else []  # its parts are layers themselves
        mode = "in training" if module.training else "in evaluation"
        parameters = module.named_parameters(recurse=False)
        frozen = [f"with {name} frozen" for name, parameter in parameters if not parameter.requires_grad]
        return " ".join([*own, mode, self.dtypes.get(id(module), ""), *frozen])

    @_while_training
    def see_backward(self, tensors: Any) -> None:
        self.begin(None)
        self.depth, self.own, self.has_backward = 0, {}, True
        first = next(_tensors(tensors), (None, None))[1]
        if first is not None:
            operations, targets, branches = _operations(first, self.outputs, self.reads_saved)
            self.add("operations", {"": operations}, self.backwards)
            self.add("branches", branches, self.backwards)
            self.add("targets", targets, self.backwards)
        after, before = _random_states(), self.states
        states = {name: [state, state != after.get(name)] for name, state in before.items()}
        self.add("random states", states, self.backwards)
        self.states, self.outputs = {}, []
        loss = first.item() if first is not None and first.numel() == 1 else None
        self.add("loss", {"": loss}, self.backwards)
        self.add("own gradient", self.own, self.backwards)
        self.backwards += 1

    @_while_training
    def see_gradient(self, key: int, gradient: torch.Tensor) -> None:
        if self.in_backward:
            if not self.record["steps"]:
                error = max(self.record["summing_error"], _summing_error(gradient))
                self.record["summing_error"] = error
            self.own[self.name(key)] = fingerprint(gradient)

    @_while_training
    def see_backward_end(self) -> None:
        grads = {key: param.grad for key, param in self.params.items() if param.grad is not None}
        self.narrow = {key: _narrow(_flat(grad)) for key, grad in grads.items()}

    @_while_training
    def see_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self.step_depth += 1
        # Horovod's `step`, which reduces, calls that of the optimizer's class, which applies the gradients.
        steps = [vars(base)["step"] for base in type(optimizer).__mro__ if "step" in vars(base)]
        if not self.has_backward and self.step_depth == 1:
            self.early, self.weights = self.early or self.prints(self.params.values()), {}
        if not self.has_backward or self.step_depth < sum(hasattr(step, "hooked") for step in steps):
            return
        params = [param for group in optimizer.param_groups for param in group["params"]]
        reduced = {id(param): fingerprint(param.grad, True) for param in params if param.grad is not None}
        for key, known in reduced.items():
            known[-1] = self.narrow.get(key) or known[-1]  # before clipping, if it was reduced by then
        self.add("reduced gradient", self.named(reduced))
        settings = {
            f"{name} of group {number}": len(value) if name == "params" else _plain(value)
            for number, group in enumerate(optimizer.param_groups)
            for name, value in group.items()
            if name not in _NO_SETTINGS
        }
        bases = [base for base in type(optimizer).__mro__ if not base.__module__.startswith(_WRAPPERS)]
        settings["class"] = bases[0].__name__
        self.add("settings of the optimizer", settings)
        self.add_state(optimizer, params)

    def add_state(self, optimizer: torch.optim.Optimizer, params: list[torch.Tensor]) -> None:
        """Record the optimizer's state, apart from zeros: no state is as good."""
        found: dict[str, dict[str, Any]] = {}
        for param in params:
            for name, value in optimizer.state.get(param, {}).items():
                is_print = isinstance(value, torch.Tensor) and (value.dim() > 0 or param.dim() == 0)
                known = fingerprint(value) if is_print else _plain(value)
                if value is not None and (known[1] if is_print else known != 0):
                    found.setdefault(name, {})[f"{name} of {self.name(id(param))}"] = known
        for number, name in enumerate(sorted(found)):
            self.add("state of the optimizer", found[name], number)

    @_while_training
    def see_step_end(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self.step_depth = max(0, self.step_depth - 1)
        if self.step_depth == 0 and self.has_backward:
            params = [param for group in optimizer.param_groups for param in group["params"]]
            weights = self.prints(params)
            self.weights = self.weights | weights
            self.add("weights after the step", self.named(weights))
            self.add("buffers after the step", self.buffers())
            self.record["steps"] += 1
            self.forwards = self.backwards = 0
            if self.record["steps"] == self.steps:
                self.write()
                self.leave()

    def write(self, error: str | None = None) -> None:
        """Write the record of this rank. error: why it is not complete, if it is not. A second call does nothing."""
        if self.has_ended:
            return
        self.has_ended = True
        self.record.update(
            error=error,
            threads=torch.get_num_threads(),
            torch=torch.__version__,
            device=str(next((tensor.device for tensor in self.params.values()), "none")),
        )
        part = self.folder / f"rank-{self.rank}.part"
        part.write_text(json.dumps(self.record))
        part.rename(part.with_suffix(".json"))

    def leave(self) -> None:
        """End this process when all ranks have written their records. No collective: the script may be inside one."""
        deadline = time.monotonic() + _LEAVE_SECONDS
        while len(list(self.folder.glob("rank-*.json"))) < self.size and time.monotonic() < deadline:
            time.sleep(0.02)  # no event tells that a process of another rank has written its file
        raise SystemExit(0)


def _plain(value: Any) -> Any:
    value = value.tolist() if isinstance(value, torch.Tensor) else value
    known = str(value) if isinstance(value, list | tuple | dict | str | None) else type(value).__name__
    return value if isinstance(value, int | float) else known


def _hook(recorder: Recorder, modules: Iterable[Any]) -> None:
    """Let `recorder` follow torch, and the collectives that the script calls in `modules`."""
    register_optimizer_step_pre_hook(recorder.see_step)
    register_optimizer_step_post_hook(recorder.see_step_end)

    # Torch has no hooks for these: those of forwards see no keyword arguments. `Tensor.backward` calls the second.
    libraries = {module.__name__.partition(".")[0] for module in modules}
    call, backward = torch.nn.Module.__call__, torch.autograd.backward
    add_param_group = torch.optim.Optimizer.add_param_group

    @functools.wraps(call)
    def recorded_call(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        recorder.see_forward(module, [*args, kwargs])
        output = None
        try:
            output = call(module, *args, **kwargs)
            return output
        finally:
            recorder.see_forward_end(module, output)

    @functools.wraps(backward)
    def recorded_backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
        if not recorder.in_backward:
            recorder.see_backward(tensors)
        is_inner, recorder.in_backward = recorder.in_backward, True
        try:
            backward(tensors, *args, **kwargs)
        finally:
            recorder.in_backward = is_inner
        if not is_inner:
            recorder.see_backward_end()

    @functools.wraps(add_param_group)
    def recorded_group(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> None:
        add_param_group(optimizer, group)
        recorder.watch(group["params"])  # now a list of tensors

    def recorded_collective(function: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def recorded(*args: Any, **kwargs: Any) -> Any:
            caller = sys._getframe(1).f_globals.get("__name__", "").partition(".")[0]
            if caller not in libraries:  # the script's own call
                with contextlib.suppress(TypeError):  # which the function raises, too
                    recorder.see_collective(function, signature.bind(*args, **kwargs).arguments)
            return function(*args, **kwargs)

        return recorded

    for module in modules:
        for name in filter(_COLLECTIVE.fullmatch, dir(module)):
            if inspect.isfunction(function := getattr(module, name)):
                setattr(module, name, recorded_collective(function))

    hooks = torch.autograd.graph.saved_tensors_hooks
    enter = hooks.__enter__

    @functools.wraps(enter)
    def recorded_enter(used: Any) -> None:
        recorder.reads_saved = False
        enter(used)

    hooks.__enter__ = recorded_enter  # type: ignore[method-assign]
    torch.nn.Module.__call__ = recorded_call  # type: ignore[method-assign]
    torch.autograd.backward = recorded_backward
    torch.optim.Optimizer.add_param_group = recorded_group  # type: ignore[method-assign, assignment]


def main(argv: Sequence[str]) -> None:
    """Run the script; see the module's docstring."""
    folder, steps, size, backend, stacks_signal, _, *command = argv
    recorder = Recorder(Path(folder), int(steps), detect(os.environ).rank, int(size))
    stacks = (recorder.folder / f"stacks-{recorder.rank}-{os.getpid()}").open("w")
    faulthandler.register(int(stacks_signal), file=stacks)
    try:
        if backend not in HOROVOD_BACKENDS:
            install()  # a script of Horovod runs on dualdist
        _hook(recorder, (importlib.import_module("horovod.torch"), dualdist, torch.distributed))
        sys.exit(run(command))
    except SystemExit as end:
        recorder.write("" if end.code else None)  # the output says why
        raise
    except BaseException:
        recorder.write(traceback.format_exc())
        raise
    finally:
        groups = torch.distributed
        if groups.is_available() and groups.is_initialized() and not dualdist.is_initialized():
            groups.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
