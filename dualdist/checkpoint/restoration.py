"""From the values of a checkpoint to live objects, on all ranks or on none.

Everything that does not fit is found before anything changes. Then the objects load, while their former states are kept
for `undo`. Modules load after them and cannot be undone, since a copy of their tensors would need as much memory again;
but by then their names and shapes are known to fit. Plain values are set last.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import random
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import numpy as np
import torch

from .. import accelerator
from ..checks import mapping
from ..collectives.objects import on_all_ranks
from ..errors import CheckpointError
from ..training.optimizer_state import load_optimizer_state
from ..world.ranks import rank
from .contents import RANKS, cloned, few, is_per_rank, is_stateful, match, state_of

# The states of the random number generators of this process: those of Python, NumPy and torch.


class RandomState:
    """The global generators of Python's `random`, NumPy and torch, and that of this process's accelerator.

    Every rank saves its own state and loads it again. In a larger world, a rank without a saved state is seeded from
    the state of rank `rank % saved` and its own rank. Its numbers then differ from every other rank's, and are the same
    each time this checkpoint is loaded. In a smaller world, the states of the missing ranks are not used.

    `iter(DataLoader(...))` draws one number from torch's generator, unless the loader has its own `generator=`. Give it
    one: otherwise a run that resumes inside an epoch draws one number more than a run without interruption.
    """

    per_rank = True
    """Makes `dualdist.checkpoint` save the state of every rank. Any object may have this and `load_derived`."""

    def state_dict(self) -> dict[str, Any]:
        """Return this process's state, in values that `torch.load(weights_only=True)` accepts."""
        kind, keys, *rest = np.random.get_state(legacy=True)
        state = {
            "python": random.getstate(),
            "numpy": (str(kind), torch.from_numpy(keys.astype(np.int64)), *rest),  # type: ignore[union-attr]
            "torch": torch.get_rng_state(),
        }
        if accelerator.is_started():
            state[str(accelerator.kind())] = accelerator.get_rng_state()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`. An accelerator's generator without a saved state is seeded from torch's state."""
        mapping("state", state, "python", "numpy", "torch", fix="Pass what state_dict() has returned.")
        random.setstate(state["python"])
        name, keys, *rest = state["numpy"]
        np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
        torch.set_rng_state(state["torch"].clone())
        kind = accelerator.kind()
        if kind in state:
            accelerator.set_rng_state(state[kind].clone())
        elif kind is not None:
            accelerator.manual_seed(_seed(state, 0))

    def load_derived(self, states: Sequence[dict[str, Any]], rank: int) -> None:
        """Seed a rank that has no state in `states`."""
        seed = _seed(states[rank % len(states)], rank)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed)


def _seed(state: dict[str, Any], rank: int) -> int:
    data = state["torch"].numpy().tobytes() + repr(state["python"]).encode() + rank.to_bytes(8, "little")
    return int.from_bytes(hashlib.sha256(data).digest()[:7], "little")


logger = logging.getLogger("dualdist")

_ADDED_TO_GROUPS = {
    "initial_lr",
    "max_lr",
    "min_lr",
    "base_momentum",
    "max_momentum",
    "swa_lr",
    "param_names",
}
"""Options that schedulers of torch.optim and named parameters add to the groups of any optimizer."""

Load = Callable[[], object]


def restore(state: Mapping[str, Any], values: Mapping[str, Any], *, strict: bool, origin: object) -> None:
    """Load the objects of `state` from `values`, and set its plain values. Collective over the world.

    strict: False loads what fits, and warns about the rest. origin: the file, for messages. Raises CheckpointError on
    every rank. Then everything is as before, except modules when the `load_state_dict` of a module raised.
    """
    found: list[Restoration] = []
    on_all_ranks(
        lambda: found.append(Restoration(state, values, strict=strict, rank=rank(), origin=origin)),
        CheckpointError,
    )
    own = found[0]
    try:
        on_all_ranks(own.load_objects, CheckpointError)
        on_all_ranks(own.load_modules, CheckpointError)
    except BaseException:
        # BaseException, to undo also when another rank has ended.
        own.undo()
        raise
    own.set_plain()


class Restoration:
    """The restoration of one rank's objects and values."""

    def __init__(
        self, state: Mapping[str, Any], values: Mapping[str, Any], *, strict: bool, rank: int, origin: object
    ) -> None:
        """Find what fits, without a change. If not everything fits: raise CheckpointError if `strict`, else warn."""
        self._state = state
        self._origin = origin
        self._objects: dict[str, Load] = {}
        self._modules: dict[str, Load] = {}
        self._plain: dict[str, Any] = {}
        self._former: dict[str, Any] = {}
        """The states of the objects before loading, except where `state_dict` failed."""
        self._begun: list[str] = []
        self._converted: set[int] = set()
        """Where the parameters are that have another dtype in the file."""
        problems = _name_problems(state, values)
        for name in [name for name in state if name in values]:
            mismatches = self._plan(name, values[name], rank)
            problems += [f"`{name}` has {' and '.join(mismatches)}"] if mismatches else []
        if problems and strict:
            raise CheckpointError(
                f"Checkpoint {origin} must fit the state, but does not: {'; '.join(problems)}. Pass strict=False to "
                "load what fits."
            )
        if problems:
            logger.warning("Checkpoint %s does not fit completely: %s.", origin, "; ".join(problems))

    def load_objects(self) -> None:
        """Load all objects except modules. When it raises CheckpointError, call `undo`."""
        for name in self._objects:
            # The user's class may raise anything.
            with contextlib.suppress(Exception):
                self._former[name] = _copied(self._state[name])
        for name, load in self._objects.items():
            self._begun.append(name)
            with self._named(name):
                load()

    def load_modules(self) -> None:
        """Load the modules. When it raises CheckpointError, call `undo`."""
        for name, load in self._modules.items():
            with self._named(name):
                load()

    def set_plain(self) -> None:
        """Set the plain values."""
        if isinstance(self._state, MutableMapping):
            self._state.update({name: cloned(value) for name, value in self._plain.items()})

    def undo(self) -> None:
        """Load the former states into the objects that have started to load."""
        for name in self._begun:
            try:
                if name not in self._former:
                    raise RuntimeError("its state_dict() failed before")
                _load(self._state[name], self._former[name], keeps_cpu=True)
            except Exception as error:
                logger.error("`%s` could not be restored to its former state: %s", name, error)

    @contextlib.contextmanager
    def _named(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            raise CheckpointError(
                f"`{name}` could not load its state from {self._origin}: {error!r}"
            ) from error

    def _plan(self, name: str, saved: Any, rank: int) -> list[str]:
        """Decide how to load `saved`, and return what does not fit."""
        value = self._state[name]
        if not is_stateful(value):
            self._plain[name] = saved
            return []
        if not isinstance(saved, Mapping):
            return [f"a plain {type(saved).__name__} in the file"]
        if isinstance(value, torch.nn.Module) and not is_per_rank(value):
            self._modules[name], mismatches = _plan_module(value, saved, self._converted)
            return mismatches
        load, mismatches = (
            _plan_per_rank(value, saved, rank)
            if is_per_rank(value)
            else _plan_object(value, saved, self._converted)
        )
        if load is not None:
            self._objects[name] = load
        return mismatches


def _copied(value: Any) -> Any:
    """Return a copy of the state of `value`. Loading an optimizer replaces its state, so that needs no copy."""
    state = value.state_dict()
    return state if isinstance(value, torch.optim.Optimizer) else cloned(state)


def _name_problems(state: Mapping[str, Any], values: Mapping[str, Any]) -> list[str]:
    missing = [f"`{name}`" for name in state if name not in values]
    unexpected = [f"`{name}`" for name in values if name not in state]
    problems = [f"it has no {few(missing)}"] if missing else []
    return problems + ([f"it has {few(unexpected)}, which the state does not have"] if unexpected else [])


def _load(value: Any, state: Any, *, keeps_cpu: bool = False) -> None:
    if isinstance(value, torch.optim.Optimizer):
        load_optimizer_state(value, state, keeps_cpu=keeps_cpu)
    else:
        value.load_state_dict(state)


def _plan_module(
    module: torch.nn.Module, saved: Mapping[str, Any], converted: set[int]
) -> tuple[Load, list[str]]:
    own = state_of(module)
    fitting, mismatches = match(own, saved)
    for name, value in fitting.items():
        mine = own[name]
        if isinstance(value, torch.Tensor) and isinstance(mine, torch.Tensor) and value.dtype != mine.dtype:
            converted.add(mine.data_ptr())
    if hasattr(saved, "_metadata") and fitting.keys() == saved.keys():
        # `saved` has the versions of the submodules, too.
        fitting = saved  # type: ignore[assignment]
    return lambda: module.load_state_dict(fitting, strict=not mismatches), mismatches


def _plan_object(value: Any, saved: Mapping[str, Any], converted: set[int]) -> tuple[Load | None, list[str]]:
    mismatches = _group_mismatches(value, saved) if isinstance(value, torch.optim.Optimizer) else []

    def load() -> None:
        groups = getattr(value, "param_groups", ()) if converted else ()
        if any(param.data_ptr() in converted for group in groups for param in group["params"]):
            # Then torch must convert the state, too.
            value.load_state_dict(cloned(saved))
        else:
            _load(value, cloned(saved))

    return None if mismatches else load, mismatches


def _plan_per_rank(value: Any, saved: Mapping[str, Any], rank: int) -> tuple[Load | None, list[str]]:
    states = saved.get(RANKS)
    if not isinstance(states, list) or not states:
        return None, ["no state for each rank in the file"]
    if rank < len(states):
        return lambda: value.load_state_dict(cloned(states[rank])), []
    derive = getattr(value, "load_derived", None)
    if derive is None:
        return None, [
            f"the states of {len(states)} ranks in the file, none for rank {rank}, and no load_derived()"
        ]
    return lambda: derive(cloned(states), rank), []


def _group_mismatches(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> list[str]:
    groups = saved.get("param_groups", [])
    own = [len(group["params"]) for group in optimizer.param_groups]
    theirs = [len(group["params"]) for group in groups]
    if own != theirs:
        return [f"groups of {theirs} parameters instead of {own}"]
    # Another version of torch may have more or fewer options. Unknown and missing ones together mean another class.
    known = {option for group in optimizer.param_groups for option in group} | _ADDED_TO_GROUPS
    unknown = sorted({option for group in groups for option in group} - known)
    missing = sorted(set(optimizer.defaults) - {option for group in groups for option in group})
    if unknown and missing:
        return [
            f"the state of another class of optimizer than {type(optimizer).__name__}, with {few(unknown)} and without "
            f"{few(missing)}"
        ]
    return []
