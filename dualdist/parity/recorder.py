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

_FIRST_NUMBERS = 10_000  # of a tensor that a layer is given or returns, to record
_LEAVE_SECONDS = 30
"""How long a rank that has recorded all steps waits for the others: one that leaves could break their last step."""


def _flat(tensor: torch.Tensor, most: int | None = None) -> torch.Tensor:
    """Return the values, or the first of them, as a vector on the CPU."""
    values = tensor.detach()
    values = values.to_local() if hasattr(values, "to_local") else values
    values = values if values.layout == torch.strided else values.to_dense()
    values = values.reshape(-1)[:most].resolve_conj().resolve_neg().cpu().contiguous()
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


def _passed(value: Any) -> list[Any]:
    """Return fingerprints of what a layer is given or returns: of the first numbers, because there are many layers."""
    with contextlib.suppress(Exception):  # as of a tensor inside vmap
        return [fingerprint(_flat(tensor, _FIRST_NUMBERS)) for _, tensor in _tensors(value)]
    return []


def _prints(tensors: dict[Any, torch.Tensor]) -> dict[Any, Any]:
    return {name: fingerprint(tensor) for name, tensor in tensors.items()}


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


@functools.cache
def _reads_mode(kind: type[Any]) -> bool:
    """Return whether the code of a layer reads its attribute `training`."""
    kinds = [base for base in kind.__mro__ if base is not torch.nn.Module]
    functions = (function for base in kinds for function in vars(base).values() if inspect.isfunction(function))
    return any("training" in function.__code__.co_names for function in functions)


def _random_states() -> dict[str, str]:
    of_numpy: Any = numpy.random.get_state()
    states: dict[str, Any] = {"torch": torch.get_rng_state().numpy(), "numpy": numpy.append(*of_numpy[1:3])}
    states["python"] = numpy.array(random.getstate()[1])
    if torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state().numpy()
    return {name: hashlib.blake2b(state, digest_size=8).hexdigest() for name, state in states.items()}


_BRANCHES = re.compile("Relu|Threshold|Hardtanh|Abs")
"""The operations whose gradient depends on the sign of what they have saved. Others save indices and masks; an LSTM
saves bytes as well, which are its working memory."""


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
    found, targets, branches = list[Any](), dict[str, Any](), dict[str, Any]()
    for node in [*_nodes([loss.grad_fn], outputs), None, *_nodes(outputs, [])]:
        if node is None:
            found.append(["", {}])
            continue
        operation = node.name().rpartition("::")[2].removesuffix("0").removesuffix("Backward")
        numbers: dict[str, Any] = {}
        kind: Any = type(node)
        for name in [name for name, is_tensor in _saved(kind) if reads_tensors or not is_tensor]:
            with contextlib.suppress(Exception):  # nothing here may end a training
                value = getattr(node, f"_saved_{name}")
                if isinstance(value, str) or (isinstance(value, bool | int | float) and value < 2**63):
                    numbers[name] = value  # from 2**63 on, it stands for a negative number
                elif not isinstance(value, torch.Tensor) or value.layout != torch.strided or value.is_complex():
                    continue
                elif name == "target":
                    targets[operation + f" {len(found)}" * (operation in targets)] = fingerprint(value)
                elif value.dim() == 0 and not value.requires_grad:
                    numbers[name] = value.item()
                elif name in ("self", "result") and _BRANCHES.search(operation):
                    branches[f"{len(found)}:{operation}"] = fingerprint(value > 0)
                elif value.dtype in (torch.bool, torch.int32, torch.int64):
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


_LIBRARIES = ("dualdist", "horovod", "torch")
"""Their own calls are not followed. The first two define optimizers that stand for others."""
_COLLECTIVE = re.compile(
    r"(grouped_|sparse_)?(all_?reduce|all_?gather|broadcast|reduce_?scatter|all_?to_?all)\w*|reduce|gather\w*|scatter\w*"
    r"|barrier|join"
)
"""The functions of dualdist, horovod.torch and torch.distributed that are collectives."""
_SHOWN = ("name", "op", "average", "root_rank", "src", "dst")
"""Their arguments that are recorded, besides tensors."""
_NO_SETTINGS = ("param_names", "foreach", "fused", "capturable", "differentiable")
"""Entries of an optimizer's group that are no settings, or change no more than the last digit."""


def _nothing(*_: Any, **__: Any) -> None:
    pass


class Recorder:
    """Follows the training of this process, and ends it after `steps` steps.

    record: what is written, with `values` as in records.py. params: the parameters of optimizers by their ids; names:
    of those that a module has. weights: those after the last step. early: those before the first step without a
    backward. root: the whole model, in its forward. calls: what each of its layers is given and returns, by their ids.
    outputs: the operations of which its outputs are. states: of random generators, before the first forward since the
    last backward. reads_saved: not where a script has hooks on saved tensors, which may compute a forward again.
    """

    def __init__(self, folder: Path, steps: int, rank: int, size: int) -> None:
        self.folder, self.steps, self.rank, self.size = folder, steps, rank, size
        self.record: dict[str, Any] = {"rank": rank, "steps": 0, "values": [], "summing_error": 0.0}
        self.params: dict[int, torch.Tensor] = {}
        self.names: dict[int, str] = {}
        self.roots: list[torch.nn.Module] = []
        self.depth = self.step_depth = self.in_backward = self.forwards = self.backwards = self.collectives = 0
        self.has_begun = self.has_backward = self.has_ended = False
        self.own: dict[str, Any] = {}
        self.weights: dict[int, Any] = {}
        self.early: dict[int, Any] = {}
        self.root: torch.nn.Module | None = None
        self.calls: dict[int, list[Any]] = {}
        self.outputs: list[Any] = []
        self.narrow: dict[int, str | None] = {}
        self.states: dict[str, str] = {}
        self.reads_saved = True

    def around(self, function: Any, before: Any = _nothing, after: Any = _nothing) -> Any:
        """Return a function that calls `before` with its arguments, and `after` with its result and its arguments.

        It does so until the last step has ended, and not while torch compiles.
        """

        @functools.wraps(function)
        def recorded(*args: Any, **kwargs: Any) -> Any:
            result = None
            try:
                if not self.has_ended and not torch.compiler.is_compiling():
                    before(*args, **kwargs)
                result = function(*args, **kwargs)
                return result
            finally:
                if not self.has_ended and not torch.compiler.is_compiling():
                    after(result, *args)

        return recorded

    def follow(self, *modules: Any) -> None:
        """Follow torch, and the collectives that the script calls in `modules`."""
        register_optimizer_step_pre_hook(self.around(_nothing, self.see_step))
        register_optimizer_step_post_hook(self.around(_nothing, self.see_step_end))
        # Torch has no hooks for these: those of forwards see no keyword arguments. `Tensor.backward` calls the second.
        hooks = torch.autograd.graph.saved_tensors_hooks
        torch.nn.Module.__call__ = self.around(torch.nn.Module.__call__, self.see_forward, self.see_forward_end)  # type: ignore[method-assign]
        torch.autograd.backward = self.around(torch.autograd.backward, self.see_backward, self.see_backward_end)
        torch.optim.Optimizer.add_param_group = self.around(torch.optim.Optimizer.add_param_group, after=self.see_group)  # type: ignore[method-assign]
        hooks.__enter__ = self.around(hooks.__enter__, lambda *_: setattr(self, "reads_saved", False))  # type: ignore[method-assign]
        for module in modules:
            for name in filter(_COLLECTIVE.fullmatch, dir(module)):
                if inspect.isfunction(function := getattr(module, name)):
                    setattr(module, name, self.around(function, functools.partial(self.see_collective, function)))

    def add(self, stage: str, values: dict[str, Any], number: int = 0, steps_ago: int = 0) -> None:
        step = self.record["steps"] if self.has_begun else -1
        self.record["values"].append([max(-1, step - steps_ago), stage, number, values])

    def see_group(self, _: None, optimizer: torch.optim.Optimizer, *__: Any) -> None:
        """Record the gradients of parameters that an optimizer is given."""
        for tensor in [tensor for group in optimizer.param_groups for tensor in group["params"]]:
            if id(tensor) not in self.params:
                self.params[id(tensor)] = tensor
                if tensor.requires_grad:
                    # Not changed by the hooks that reduce: autograd passes what this process has computed.
                    tensor.register_hook(self.around(_nothing, functools.partial(self.see_gradient, id(tensor))))

    def named(self, values: dict[int, Any]) -> dict[str, Any]:
        return {self.name(key): value for key, value in values.items()}

    def name(self, key: int) -> str:
        return self.names.get(key) or f"parameter {list(self.params).index(key)}"

    def buffers(self) -> dict[str, Any]:
        named = (pair for root in self.roots for pair in root.named_buffers())
        return _prints({without_wrappers(name): buffer for name, buffer in named})

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
            self.add("initial weights", self.named(_prints(self.params)))
            self.add("initial buffers", self.buffers())
            self.has_begun = True

    def see_collective(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> None:
        caller = sys._getframe(2).f_globals.get("__name__", "").partition(".")[0]
        if caller in _LIBRARIES:  # not the script's own call
            return
        with contextlib.suppress(TypeError):  # which the function raises, too
            arguments = inspect.signature(function).bind(*args, **kwargs).arguments
            shown = [f"{name}={value}" for name, value in arguments.items() if name in _SHOWN]
            shown += [f"{dtype_name(it.dtype)}{list(it.shape)}" for _, it in _tensors(arguments)]
            # Until the next forward, it belongs to the step before.
            values, ago = {"": f"{function.__name__}({', '.join(shown)})"}, int(self.forwards == 0)
            self.add("collective", values, self.collectives, steps_ago=ago)
            self.collectives += 1

    def see_forward(self, module: torch.nn.Module, /, *args: Any, **kwargs: Any) -> None:
        self.depth += 1
        is_training = self.depth == 1 and torch.is_grad_enabled() and not self.in_backward
        if is_training and next(module.parameters(), None) is not None:  # a loss has none
            self.begin(module)
            weights = _prints(self.params) if self.forwards == 0 else {}
            if any(self.weights.get(key, known) != known for key, known in weights.items()):
                self.add("weights before the forward", self.named(weights))
            self.collectives *= self.forwards > 0
            batch = dict(_tensors([*args, kwargs]))
            self.add("batch", _prints(batch), self.forwards)
            rows = (_rows(tensor) for tensor in batch.values() if tensor.dim() and 0 < len(tensor) < 10_000)
            self.add("samples", {"": next(rows, [])}, self.forwards)
            self.states = self.states or _random_states()
            self.root, self.calls = module, {}
            self.forwards += 1
        elif self.root is not None:
            self.calls.setdefault(id(module), [_passed([*args, kwargs])])

    def see_forward_end(self, output: Any, module: torch.nn.Module, *_: Any) -> None:
        self.depth = max(0, self.depth - 1)
        if self.root is not None:
            self.calls[id(module)] = [*self.calls.pop(id(module), [[]]), _passed(output)][:2]  # the first call
        if module is self.root and self.depth == 0:
            tensors = dict(_tensors(output, ""))
            names = {id(made): without_wrappers(name) for name, made in module.named_modules()}
            layers = {names[id(made)]: self.layer(made) for made in module.modules()}
            calls = {names[key]: call for key, call in self.calls.items() if names.get(key)}
            self.add("layers", layers, self.forwards - 1)
            self.add("calls", calls, self.forwards - 1)
            self.add("output of the model", _prints(tensors), self.forwards - 1)
            self.root = None
            self.outputs = [tensor.grad_fn for tensor in tensors.values() if tensor.grad_fn is not None]

    def layer(self, module: torch.nn.Module) -> str:
        """Return what makes a layer compute what it does, besides its weights."""
        kind: Any = type(module)
        own = [kind.__name__ + re.sub(r",? ?inplace=\w+", "", f"({module.extra_repr()})")]
        if next(module.children(), None) is not None:  # its parts are layers themselves
            numbers = vars(module).items() if kind.__module__.startswith("torch.nn.") else ()
            own = [
                f"{name}={it}"
                for name, it in numbers
                if isinstance(it, int | float) and name[0] != "_" and name != "training"
            ]
        parameters = module.named_parameters(recurse=False)
        frozen = [f"with {name} frozen" for name, parameter in parameters if not parameter.requires_grad]
        mode = [f"in {'training' if module.training else 'evaluation'}"] if _reads_mode(kind) else []
        returned = self.calls.get(id(module), [[]])[-1]
        return " ".join([*own, *mode, returned[0][3].partition("[")[0] if returned else "", *frozen])

    def see_backward(self, tensors: Any, *_: Any, **__: Any) -> None:
        self.in_backward += 1
        if self.in_backward > 1:
            return
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

    def see_gradient(self, key: int, gradient: torch.Tensor) -> None:
        if self.in_backward:
            if not self.record["steps"]:
                self.record["summing_error"] = max(self.record["summing_error"], _summing_error(gradient))
            self.own[self.name(key)] = fingerprint(gradient)

    def see_backward_end(self, *_: Any) -> None:
        self.in_backward -= 1
        if not self.in_backward:
            grads = {key: param.grad for key, param in self.params.items() if param.grad is not None}
            self.narrow = {key: _narrow(_flat(grad)) for key, grad in grads.items()}

    def see_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self.step_depth += 1
        # Horovod's `step`, which reduces, calls that of the optimizer's class, which applies the gradients.
        steps = [vars(base)["step"] for base in type(optimizer).__mro__ if "step" in vars(base)]
        if not self.has_backward and self.step_depth == 1:
            self.early, self.weights = self.early or _prints(self.params), {}
        if not self.has_backward or self.step_depth < sum(hasattr(step, "hooked") for step in steps):
            return
        params = [param for group in optimizer.param_groups for param in group["params"]]
        reduced = {id(param): fingerprint(param.grad, True) for param in params if param.grad is not None}
        for key, known in reduced.items():
            known[-1] = self.narrow.get(key) or known[-1]  # before clipping, if it was reduced by then
        self.add("reduced gradient", self.named(reduced))
        bases = [base for base in type(optimizer).__mro__ if base.__module__.partition(".")[0] not in _LIBRARIES[:2]]
        settings = {"class": bases[0].__name__} | {
            f"{name} of group {number}": len(value) if name == "params" else _plain(value)
            for number, group in enumerate(optimizer.param_groups)
            for name, value in group.items()
            if name not in _NO_SETTINGS
        }
        self.add("settings of the optimizer", settings)
        found: dict[str, dict[str, Any]] = {}  # apart from zeros: no state is as good
        for param in params:
            for name, value in optimizer.state.get(param, {}).items():
                is_print = isinstance(value, torch.Tensor) and (value.dim() > 0 or param.dim() == 0)
                known = fingerprint(value) if is_print else _plain(value)
                if value is not None and (known[1] if is_print else known != 0):
                    found.setdefault(name, {})[f"{name} of {self.name(id(param))}"] = known
        for number, name in enumerate(sorted(found)):
            self.add("state of the optimizer", found[name], number)

    def see_step_end(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self.step_depth = max(0, self.step_depth - 1)
        if self.step_depth == 0 and self.has_backward:
            weights = _prints({id(param): param for group in optimizer.param_groups for param in group["params"]})
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
        device = str(next((tensor.device for tensor in self.params.values()), "none"))
        end = {"error": error, "threads": torch.get_num_threads(), "torch": torch.__version__, "device": device}
        part = self.folder / f"rank-{self.rank}.part"
        part.write_text(json.dumps(self.record | end))
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


def main(argv: Sequence[str]) -> None:
    """Run the script; see the module's docstring."""
    folder, steps, size, backend, stacks_signal, _, *command = argv
    recorder = Recorder(Path(folder), int(steps), detect(os.environ).rank, int(size))
    stacks = (recorder.folder / f"stacks-{recorder.rank}-{os.getpid()}").open("w")
    faulthandler.register(int(stacks_signal), file=stacks)
    try:
        if backend not in HOROVOD_BACKENDS:
            install()  # a script of Horovod runs on dualdist
        recorder.follow(importlib.import_module("horovod.torch"), dualdist, torch.distributed)
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
