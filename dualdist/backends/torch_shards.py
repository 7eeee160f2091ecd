"""Checkpoints of models that torch has sharded: torch.distributed.checkpoint (DCP) writes and reads each rank's parts.

The parts of a checkpoint are one flat dictionary, with the names that torch's own trainers use, such as
`model.0.weight`, `optimizer.state.0.weight.exp_avg` and `optimizer.param_groups.0.weight.lr`. A folder also has the
hyperparameters by the number of their group (`optimizer.param_groups.0.lr`), which Accelerate and Lightning read.
"""

from __future__ import annotations

import contextlib
import copy
import io
import re
from collections.abc import Iterator, Mapping, Set
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

from ..errors import CheckpointError
from .torch_interface import adopted_config, wrapped

_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
_OF_GROUP = re.compile(r"param_groups\.(\d+)\.(.+)")
_AMBIGUOUS = re.compile(r"param_groups\.\d+\.[^.]+")
"""A hyperparameter of a group, or of a parameter with a number for a name."""
Objects = Mapping[str, torch.nn.Module | torch.optim.Optimizer]
Parts = dict[str, Any]


@contextlib.contextmanager
def _reported(what: str) -> Iterator[None]:
    """Convert the exceptions of DCP, which are no Exceptions, into CheckpointError, and those of c10d."""
    try:
        with wrapped():
            yield
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items())
        raise CheckpointError(f"Rank {rank} failed {what}: {type(cause).__name__}: {cause}") from error


class PartGroup:
    """A group of torch over the world that nothing else uses: an asynchronous save communicates in a thread."""

    def __init__(self, seconds: float) -> None:
        """Connect the ranks. Collective over the world. seconds: how long to wait for another rank."""
        self._group: Any = dist.new_group(backend=adopted_config()["cpu"], timeout=timedelta(seconds=seconds))

    def close(self) -> None:
        """Disconnect the ranks."""
        with contextlib.suppress(ValueError):  # torch does not know it any more: it was destroyed before
            dist.destroy_process_group(self._group)

    def gather(self, value: Any) -> list[Any]:
        """Return each rank's `value`, in rank order. Collective. Raises HorovodInternalError if a rank has ended."""
        gathered: list[Any] = [None] * dist.get_world_size()
        with wrapped():
            dist.all_gather_object(gathered, value, group=self._group)
        return gathered

    def write(self, folder: Path, parts: Parts) -> None:
        """Write this rank's `parts` into `folder`. Collective; it may run in another thread."""
        with _reported(f"to write its part of {folder}"):
            dcp.save(parts, storage_writer=dcp.FileSystemWriter(folder), process_group=self._group)

    def read(self, folder: Path, parts: Parts) -> None:
        """Overwrite `parts` with those in `folder`, which has all of them. Collective."""
        with _reported(f"to read its part of {folder}"):
            dcp.load(
                parts,
                storage_reader=dcp.FileSystemReader(folder),
                planner=_Planner(),
                process_group=self._group,
            )


class _Planner(DefaultLoadPlanner):
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        torch.load(value, weights_only=True)  # raises where loading would run code
        value.seek(0)
        super().load_bytes(read_item, value)


@contextlib.contextmanager
def _undoing_first_step(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Let torch make the state that `optimizer` lacks: it takes a step with gradients of 0 and a rate of 0.

    At the end, parameters and gradients are what they were, which some optimizers change all the same. Step hooks run.
    """
    if optimizer.state:
        yield
        return
    with torch.no_grad():
        kept = [
            (param, param.grad, _local(param).clone())
            for group in optimizer.param_groups
            for param in group["params"]
        ]
        try:
            for param, *_ in kept:
                param.grad = None
            yield
        finally:
            for param, grad, data in kept:
                param.grad = grad
                _local(param).copy_(data)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def parts_of(objects: Objects) -> tuple[Parts, Parts]:
    """Return the parts of this rank as a checkpoint names them, and the hyperparameters by the number of their group.

    The parts share memory with `objects`. Those of an optimizer without state are of the state before its first step,
    and it stays without. The second are none of an optimizer whose parameters have numbers for names.
    Raises CheckpointError if the model of an optimizer is missing.
    """
    parts: Parts = {}
    by_group: Parts = {}
    for name, value in objects.items():
        if isinstance(value, torch.nn.Module):
            named: Mapping[str, Any] = get_model_state_dict(value)
        else:
            is_new, model = not value.state, _model_of(name, value, objects)
            with _undoing_first_step(value):
                named = get_optimizer_state_dict(model, value, options=_FLAT)
                groups: Any = get_optimizer_state_dict(model, value)["param_groups"]
            if not any(map(_AMBIGUOUS.fullmatch, named)):
                by_group |= {
                    f"{name}.param_groups.{number}.{key}": part
                    for number, group in enumerate(groups)
                    for key, part in group.items()
                }
            if is_new:
                value.state.clear()
                for key, part in named.items():
                    if key.endswith(".step") and isinstance(part, torch.Tensor):
                        part.zero_()
        parts |= {f"{name}.{key}": part for key, part in named.items()}
    return parts, by_group


def copied(parts: Parts) -> Parts:
    """Return `parts` in host memory that nothing else uses."""
    # dcp.async_save of torch 2.6 does not copy tensors of the CPU. An error here must be agreed on before DCP connects.
    return {
        name: part.detach().to("cpu", copy=True) if isinstance(part, torch.Tensor) else copy.deepcopy(part)
        for name, part in parts.items()
    }


def set_parts(objects: Objects, parts: Parts) -> None:
    """Load all `parts` into the objects. Hyperparameters saved by group replace those saved by parameter."""
    for name, value in objects.items():
        named = {
            key.removeprefix(f"{name}."): part for key, part in parts.items() if key.startswith(f"{name}.")
        }
        if isinstance(value, torch.nn.Module):
            set_model_state_dict(value, named)
        else:
            model = _model_of(name, value, objects)
            with _undoing_first_step(value):
                set_optimizer_state_dict(model, value, named | _by_parameter(named), options=_FLAT)


def _by_parameter(named: Parts) -> Parts:
    """Return the hyperparameters that `named` has by group under the names of the parameters in the group."""
    found: dict[str, Parts] = {}
    for key, part in named.items():
        if match := _OF_GROUP.fullmatch(key):
            found.setdefault(match[1], {})[match[2]] = part
    renamed: Parts = {}
    for group in found.values():
        for param in group.pop("params", ()):
            for key, part in group.items():
                own = named.get(f"param_groups.{param}.{key}")
                if isinstance(own, torch.Tensor) and isinstance(part, torch.Tensor):
                    part = part.to(own.device)
                renamed[f"param_groups.{param}.{key}"] = part
    return renamed


def _model_of(name: str, optimizer: torch.optim.Optimizer, objects: Objects) -> torch.nn.Module:
    own = {id(param) for group in optimizer.param_groups for param in group["params"]}
    for value in objects.values():
        if isinstance(value, torch.nn.Module) and own <= {id(param) for param in value.parameters()}:
            return value
    raise CheckpointError(
        f"`state` must have the model of `{name}`, whose names its parts get, but has none with its parameters."
    )


def differences(folder: Path, parts: Parts, objects: Objects, known: Set[str]) -> tuple[Parts, list[str]]:
    """Return what `PartGroup.read` is to overwrite with what `folder` has, and what does not match.

    The first are the `parts` of the same shape, and hyperparameters by group where `folder` has none by parameter.
    known: the names of the parts of all ranks.
    """
    try:
        saved = dict(dcp.FileSystemReader(folder).read_metadata().state_dict_metadata)
    except OSError as error:
        raise CheckpointError(f"`path` must be a checkpoint of DCP, but {error}.") from error
    by_group: Parts = {}
    missing: set[str] = set()
    for name in [name for name, value in objects.items() if isinstance(value, torch.optim.Optimizer)]:
        prefix = f"{name}."
        own = {key for key in parts if key.startswith(f"{prefix}param_groups.")}
        found = own & saved.keys()
        if f"{prefix}param_groups.0.params" in saved:
            found = {key for key in found if not _AMBIGUOUS.fullmatch(key.removeprefix(prefix))}
            names = [
                key for key in saved if _OF_GROUP.fullmatch(key.removeprefix(prefix)) and key not in found
            ]
            groups = {key: saved.pop(key) for key in names}
            if not found:
                by_group |= {key: _place(entry) for key, entry in groups.items()}
                parts = {key: part for key, part in parts.items() if key not in own}
        elif not found:
            missing |= own
    tensors = {name: entry.size for name, entry in saved.items() if isinstance(entry, TensorStorageMetadata)}
    owned = {name: part for name, part in parts.items() if isinstance(part, torch.Tensor)}
    others = (parts.keys() & saved.keys()) & (owned.keys() ^ tensors.keys())
    shapes = [
        f"{name}: {tuple(tensors[name])} instead of {tuple(part.shape)}"
        for name, part in owned.items()
        if tensors.get(name, part.shape) != part.shape
    ]
    fitting = (parts.keys() & saved.keys()) - others - {text.split(": ")[0] for text in shapes}
    kinds = {
        "missing": sorted(missing | owned.keys() - saved.keys()),
        "unexpected": sorted(tensors.keys() - known),
        "of another kind": sorted(others),
        "of another shape": shapes,
    }
    return {name: parts[name] for name in fitting} | by_group, [
        f"{len(found)} {kind} ({', '.join(found[:3])})" for kind, found in kinds.items() if found
    ]


def _place(entry: Any) -> torch.Tensor | None:
    """Return what DCP overwrites with the value that `entry` describes."""
    is_tensor = isinstance(entry, TensorStorageMetadata)
    return torch.empty(entry.size, dtype=entry.properties.dtype, device="cpu") if is_tensor else None
