"""Checkpoints of models that torch has sharded: torch.distributed.checkpoint (DCP) writes and reads each rank's parts.

The parts of a checkpoint are one flat dictionary, with the names that torch's own trainers use, such as
`model.0.weight`, `optimizer.state.0.weight.exp_avg` and `optimizer.param_groups.0.lr`. If ranks have different groups,
as in a pipeline, hyperparameters have the name of a parameter instead: `optimizer.param_groups.0.weight.lr`.
`optimizer.structure.*` has what names and shapes do not show: containers, and which tensors of a state are divided.

torch's own functions for the state of an optimizer take a step to create what is missing. The state passes through them
only to rename its parameters, in the guise of an optimizer that has state.
"""

from __future__ import annotations

import contextlib
import io
import zlib
from collections import defaultdict
from collections.abc import Callable, Container, Iterator, Mapping, Set
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem, SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Replicate, empty
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map

from ..checkpoint.save_and_load import option_mismatches
from ..core.backends.torch_groups import wrapped
from ..core.training.optimizer_state import load_optimizer_state
from ..errors import CheckpointError

Objects = Mapping[str, torch.nn.Module | Optimizer]
Parts = dict[str, Any]
Groups = dict[str, list[Parts]]
"""The groups of each optimizer, with the names of their parameters under "params"."""
State = dict[tuple[str, Any], Any]
"""By "param" and the name of a parameter: its state. By "state" or "" and another key: what is there, or beside it."""
_OF_PARAMS = ("params", "param_names")
"""What a group has that belongs to its parameters, and is not loaded."""


@contextlib.contextmanager
def _reported(what: str) -> Iterator[None]:
    """Convert the exceptions of DCP, which are no Exceptions, into CheckpointError, and those of c10d."""
    try:
        with wrapped():
            yield
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items())
        raise CheckpointError(f"Rank {rank} failed {what}: {type(cause).__name__}: {cause}") from error


def write_parts(folder: Path, parts: Parts, group: Any) -> None:
    """Write this rank's `parts` into `folder`. Collective over `group`; it may run in another thread."""
    with _reported(f"to write its part of {folder}"):
        dcp.save(parts, storage_writer=_Writer(folder), process_group=group)


def read_parts(folder: Path, parts: Parts, group: Any) -> None:
    """Overwrite `parts` with those in `folder`, which has all of them. Collective over `group`."""
    with _reported(f"to read its part of {folder}"):
        dcp.load(parts, storage_reader=dcp.FileSystemReader(folder), planner=_Planner(), process_group=group)


class _Writer(dcp.FileSystemWriter):
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Any:
        try:
            return super().write_data(plan, planner)
        except Exception as error:
            # After a failed write, closing torch's archive fails, too, and hides that the disk was full.
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, OSError):
                cause = cause.__context__
            raise cause or error from None


class _Planner(DefaultLoadPlanner):
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        torch.load(value, weights_only=True)  # raises where loading would run code
        value.seek(0)
        super().load_bytes(read_item, value)


def _stateful(optimizer: Optimizer, **methods: Callable[..., Any]) -> Any:
    """Return `optimizer` with other methods, and as one that has state: torch takes no step to create it."""
    return SimpleNamespace(state={None: None}, param_groups=optimizer.param_groups, **methods)


def _named_state(optimizer: Optimizer, model: torch.nn.Module) -> tuple[State, list[Parts]]:
    """Return what `optimizer` has beside its groups, and the groups with names."""
    own = optimizer.state_dict()
    of_params = {key: value for key, value in own["state"].items() if isinstance(key, int)}
    others: State = {("state", key): value for key, value in own["state"].items() if key not in of_params}
    others |= {("", key): value for key, value in own.items() if key not in ("state", "param_groups")}
    given = {"state": of_params, "param_groups": [dict(group) for group in own["param_groups"]]}
    named: Any = get_optimizer_state_dict(model, (_stateful(optimizer, state_dict=lambda: given),))
    return {("param", name): value for name, value in named["state"].items()} | others, named["param_groups"]


def _flattened(value: Any, name: str, flat: Parts) -> Any:
    """Return the containers in `value`, with names that begin with `name` for what they hold, which `flat` gets."""
    if isinstance(value, Mapping):
        return {key: _flattened(item, f"{name}.{key}", flat) for key, item in value.items()}
    if isinstance(value, list | tuple) and any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(value)):
        items = [_flattened(item, f"{name}.{place}", flat) for place, item in enumerate(value)]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, DTensor) and any(placement.is_partial() for placement in value.placements):
        # DCP would write the share of one rank.
        value = value.redistribute(placements=[Replicate()] * value.device_mesh.ndim)
    while name in flat:  # for keys such as 1 and "1"
        name += "'"
    flat[name] = value
    return name


def _is_divided(name: str, shape: torch.Size, param: Any) -> bool:
    """Return whether most optimizers divide a part of their state, of this name and shape, as `param`."""
    return isinstance(param, torch.Tensor) and shape == param.shape and not name.endswith(".step")


def parts_of(objects: Objects) -> tuple[Parts, Groups]:
    """Return the parts of this rank as a checkpoint names them, and the groups of the optimizers. Takes no step.

    Both share memory with `objects`. Raises CheckpointError if the model of an optimizer is missing.
    """
    modules = {name: value for name, value in objects.items() if isinstance(value, torch.nn.Module)}
    models = {name: get_model_state_dict(module) for name, module in modules.items()}
    parts: Parts = {f"{name}.{key}": part for name, named in models.items() for key, part in named.items()}
    groups: Groups = {}
    for name, optimizer in _optimizers(objects):
        model, module = _model_of(name, optimizer, objects)
        state, groups[name] = _named_state(optimizer, module)
        for (kind, key), value in state.items():
            state[kind, key] = _flattened(value, f"{name}.{'state.' if kind else ''}{key}", parts)
        unusual = [
            key
            for (kind, param), containers in state.items()
            if kind == "param" and isinstance(like := models[model].get(param), DTensor)
            for key in tree_leaves(containers)
            if isinstance(part := parts[key], torch.Tensor)
            and isinstance(part, DTensor) != _is_divided(key, part.shape, like)
        ]
        structure = state, unusual
        # Ranks with equal structures write one of them.
        parts[f"{name}.structure.{zlib.crc32(repr(structure).encode()):08x}"] = structure
    return parts, groups


def hyperparameters(groups: Groups, *, by_number: bool) -> Parts:
    """Return the hyperparameters by the number of their group, or by the name of each parameter in it."""
    return {
        f"{name}.param_groups.{place}.{key}": value
        for name, each in groups.items()
        for number, group in enumerate(each)
        for place in ([number] if by_number else group["params"])
        for key, value in group.items()
        if by_number or key not in _OF_PARAMS
    }


def _optimizers(objects: Objects) -> list[tuple[str, Optimizer]]:
    return [(name, value) for name, value in objects.items() if isinstance(value, Optimizer)]


def _model_of(name: str, optimizer: Optimizer, objects: Objects) -> tuple[str, torch.nn.Module]:
    own = {id(param) for group in optimizer.param_groups for param in group["params"]}
    for model, value in objects.items():
        if isinstance(value, torch.nn.Module) and own <= {id(param) for param in value.parameters()}:
            return model, value
    raise CheckpointError(
        f"`state` must have the model of `{name}`, whose names its parts get, but has none with its parameters."
    )


def _owner(name: str, names: Container[str]) -> str:
    """Return the one of `names` that is `name`, or with which and a dot it begins; "" if there is none."""
    return next((own for own in accumulate(name.split("."), "{}.{}".format) if own in names), "")


def _place(entry: Any, param: Any = None, mesh: Any = None) -> Any:
    """Return what DCP overwrites with what `entry` describes: divided as `param`, whole on all of `mesh`, or plain."""
    if not isinstance(entry, TensorStorageMetadata):
        return None
    size, dtype = entry.size, entry.properties.dtype
    if param is not None and param.shape == size:
        return torch.empty_like(param, dtype=dtype)
    if mesh is None:
        return torch.empty(size, dtype=dtype, device="cpu")
    return empty(size, dtype=dtype, device_mesh=mesh, placements=[Replicate()] * mesh.ndim)


class _SavedOptimizer:
    """What a folder has of one optimizer."""

    def __init__(self, name: str, optimizer: Optimizer, groups: list[Parts], saved: Mapping[str, Any]) -> None:
        self.name, self.optimizer, self._groups = name, optimizer, groups
        self.params = {param: None for group in groups for param in group["params"]}
        self.saved = {key.removeprefix(f"{name}."): saved[key] for key in saved if key.startswith(f"{name}.")}
        self._by_number = "param_groups.0.params" in self.saved
        described = filter(self._describes, self.saved)
        self.described = {f"{name}.{key}": _place(self.saved[key]) for key in described}
        """The structure and the hyperparameters, which are read first."""
        self.options: dict[str, Parts] = {}
        """The hyperparameters of each parameter."""
        self._state: State = {}
        """The containers in the state, with the names of their parts."""
        self._unusual: list[str] = []
        """The parts that are not divided as others of their shape."""

    def _describes(self, key: str) -> bool:
        kind, _, rest = key.partition(".")
        owner = _owner(rest, self.params)
        if kind != "param_groups" or not self._by_number:
            return kind == "structure" or (kind == "param_groups" and owner != "")
        # An older release also wrote hyperparameters by the names of parameters, such as 0.weight.
        return rest.partition(".")[0].isdigit() and "." not in owner

    def describe(self, described: Parts) -> None:
        """Take in the parts `described`, which were read."""
        groups: dict[str, Parts] = defaultdict(dict)
        for name in self.described:
            kind, _, rest = name.removeprefix(f"{self.name}.").partition(".")
            if kind == "structure":
                state, unusual = described[name]
                self._state |= state
                self._unusual += unusual
            else:
                place = rest.partition(".")[0] if self._by_number else _owner(rest, self.params)
                groups[place][rest.removeprefix(f"{place}.")] = described[name]
        for place, group in groups.items():
            options = {key: part for key, part in group.items() if key not in _OF_PARAMS}
            self.options |= dict.fromkeys(group.get("params", [place]), options)
        if not any(key.startswith("structure.") for key in self.saved):
            self._guess()

    def _guess(self) -> None:
        """Take all containers for dictionaries: an older release or another program has written no structure."""
        for key in self.saved:
            kind, _, rest = key.partition(".")
            if kind == "state" and (param := _owner(rest, self.params)):
                place = self._state.setdefault(("param", param), {})
                *names, last = rest.removeprefix(f"{param}.").split(".")
                for name in names:
                    place = place.setdefault(name, {})
                place[last] = f"{self.name}.{key}"

    def differences(self, known: Set[str]) -> dict[str, list[str]]:
        """Return what does not match. known: as for `Loading.compare`."""
        prefix = f"{self.name}.param_groups."
        keys = [f"state.{param}" for param in self.options]
        keys += [key for key, entry in self.saved.items() if key.startswith("state.") and _is_tensor(entry)]
        others = tree_leaves([found for (kind, _), found in self._state.items() if kind != "param"])
        names = {f"{self.name}.{key}" for key in keys} - set(others)
        mixed = [
            prefix + param
            for group in self._groups
            for param in group["params"]
            if self.options.get(param) not in (None, self._options_of(group))
        ]
        return {
            "missing": [prefix + param for param in self.params if param not in self.options],
            "of one group with different values": mixed,
            "unexpected": [name for name in names if not _owner(name, known)],
        }

    def places(self, own: Parts, params: Parts) -> Parts:
        """Return what DCP is to overwrite with the state: the part in `own` if it is like the saved one.

        params: the parts of the model whose state is loaded.
        """
        mesh = next((part.device_mesh for part in params.values() if isinstance(part, DTensor)), None)
        for name in [name for kind, name in self._state if kind == "param" and name not in params]:
            del self._state["param", name]
        places: Parts = {}
        for (kind, key), containers in self._state.items():
            param = params[key] if kind == "param" else None
            for name in tree_leaves(containers):
                entry = self.saved[name.removeprefix(f"{self.name}.")]
                is_usual = name not in self._unusual
                is_divided = _is_tensor(entry) and _is_divided(name, entry.size, param) == is_usual
                new = _place(entry, param, mesh) if is_divided else _place(entry)
                mine: Any = own.get(name)
                is_like = _is_tensor(entry) and type(mine) is type(new) and mine.dtype == new.dtype
                places[name] = mine if is_like and mine.shape == new.shape else new
        return places

    def _options_of(self, group: Parts) -> Parts:
        return next((self.options[param] for param in group["params"] if param in self.options), {})

    def state_dict(self, read: Parts) -> dict[str, Any]:
        """Return what the optimizer is to load, with the names of its parameters."""
        groups = []
        for group in self._groups:
            options = self._options_of(group)
            moved = {
                key: part.to(getattr(group.get(key), "device", "cpu"), copy=True)
                for key, part in options.items()
                if isinstance(part, torch.Tensor)
            }
            groups.append(group | options | moved)
        loaded: dict[str, Any] = {"state": {}, "param_groups": groups}
        for (kind, key), containers in self._state.items():
            (loaded["state"] if kind else loaded)[key] = tree_map(read.__getitem__, containers)
        return loaded


def _is_tensor(entry: Any) -> bool:
    return isinstance(entry, TensorStorageMetadata)


def _to_load(optimizer: Optimizer, model: torch.nn.Module, named: dict[str, Any]) -> dict[str, Any]:
    """Return the state dict `named`, which has the names of parameters, as `optimizer` loads it."""
    state, groups = named["state"], named["param_groups"]
    names = [param for group in groups for param in group["params"]]
    if FullyShardedDataParallel.fsdp_modules(model):
        of_params = {name: state.pop(name, {}) for name in names} if state else {}
        given = {"state": of_params, "param_groups": groups}
        stateful = _stateful(optimizer, load_state_dict=lambda state_dict: named.update(state_dict))
        set_optimizer_state_dict(model, (stateful,), given)
        return named | {"state": {key: value for key, value in named["state"].items() if value} | state}
    numbers = {name: number for number, name in enumerate(names)}
    return named | {
        "state": {numbers.get(key, key): value for key, value in state.items()},
        "param_groups": [group | {"params": [numbers[name] for name in group["params"]]} for group in groups],
    }


class Loading:
    """What this rank loads from a folder: first `read_parts` overwrites `described`, and then `parts`."""

    def __init__(self, folder: Path, objects: Objects, *, partial: bool) -> None:
        """partial: ignore what is not of `objects`. Raises CheckpointError if `folder` has no metadata of DCP."""
        try:
            self._saved: dict[str, Any] = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
        except OSError as error:
            raise CheckpointError(f"`path` must be a checkpoint of DCP, but {error}.") from error
        if partial:
            named = tuple(f"{name}." for name in objects)
            self._saved = {key: entry for key, entry in self._saved.items() if key.startswith(named)}
        self._objects = objects
        self._own, groups = parts_of(objects)
        self._optimizers = [_SavedOptimizer(*each, groups[each[0]], self._saved) for each in _optimizers(objects)]
        self._prefixes = tuple(f"{name}." for name in groups)
        self._of_models = {key: part for key, part in self._own.items() if not key.startswith(self._prefixes)}
        self.described = {key: place for each in self._optimizers for key, place in each.described.items()}
        self.parts: Parts = {}

    @property
    def names(self) -> list[str]:
        """The names of the parts of this rank's models, and the beginnings of those of the state of parameters."""
        states = [f"{each.name}.state.{param}" for each in self._optimizers for param in each.params]
        return [*self._of_models, *states]

    def compare(self, known: Set[str]) -> list[str]:
        """Take in `described`, choose the `parts`, and return what does not match. known: the `names` of all ranks."""
        own = self._of_models
        tensors = {name: entry.size for name, entry in self._saved.items() if _is_tensor(entry)}
        owned = {name: part for name, part in own.items() if isinstance(part, torch.Tensor)}
        others = (own.keys() & self._saved.keys()) & (owned.keys() ^ tensors.keys())
        shapes = {
            name: f"{name}: {tuple(tensors[name])} instead of {tuple(part.shape)}"
            for name, part in owned.items()
            if tensors.get(name, part.shape) != part.shape
        }
        kinds: dict[str, list[str]] = {
            "missing": sorted(owned.keys() - self._saved.keys()),
            "unexpected": sorted(key for key in tensors.keys() - known if not key.startswith(self._prefixes)),
            "of another kind": sorted(others),
            "of another shape": list(shapes.values()),
        }
        self.parts = {name: own[name] for name in (own.keys() & self._saved.keys()) - others - shapes.keys()}
        problems, optimizers, self._optimizers = [], self._optimizers, []
        for each in optimizers:
            each.describe(self.described)
            if wrong := option_mismatches(each.optimizer, set().union(*each.options.values())):
                problems.append(f"`{each.name}` has {' and '.join(wrong)}")
                continue
            self._optimizers.append(each)
            for kind, found in each.differences(known).items():
                kinds.setdefault(kind, []).extend(sorted(found))
            model, _ = _model_of(each.name, each.optimizer, self._objects)
            names = {param: f"{model}.{param}" for param in each.params}
            params = {param: own.get(name) for param, name in names.items() if name not in shapes}
            self.parts |= each.places(self._own, params)
        texts = [f"{len(found)} {kind} ({', '.join(found[:3])})" for kind, found in kinds.items() if found]
        return [*problems, *([f"it has {' and '.join(texts)} parts"] if texts else [])]

    def finish(self) -> None:
        """Load the `parts`."""
        loaded = self._of_models | self.parts
        for name, value in self._objects.items():
            if isinstance(value, torch.nn.Module):
                keys = [key for key in self._of_models if key.startswith(f"{name}.")]
                set_model_state_dict(value, {key.removeprefix(f"{name}."): loaded[key] for key in keys})
        for each in filter(lambda each: each.saved, self._optimizers):
            name, model = _model_of(each.name, each.optimizer, self._objects)
            state = _to_load(each.optimizer, model, each.state_dict(self.parts))
            keys = [key for param in each.params if (key := f"{name}.{param}") in self.parts]
            if any(self._saved[key].properties.dtype != self._own[key].dtype for key in keys):
                each.optimizer.load_state_dict(state)  # torch converts the state as its parameters
            else:
                load_optimizer_state(each.optimizer, state)
