"""What a training script on several ranks must give: plain copies of it, one for each rank, combined by rules.

- A backward combines in the style `module` outside no_sync, and in the style `optimizer` when it is the
  backward_passes_per_step-th one to reach a parameter since that was last combined, outside no_sync.
- It combines every parameter that a backward on some rank has reached since the last combination. The first combination
  since a step, in the style `optimizer`, also combines all other gradients there are, as Horovod's does; but a backward
  leaves them to the step if it sums, or has a communication hook. The new gradient on every rank is the average or sum
  of the current ones, None counting as zero, unless all are None. All others stay as they are.
- The result is written into the gradient that is there; into a new one where there is None.
- A step in the style `optimizer` first combines what is left, or everything if nothing has been combined since the
  last one. If some rank has numbers in a gradient that no backward has reached since the last step, all of those are
  left, too. Then gradients that are None become zeros if they are required and were not combined since the last step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import torch

from .mutation_model import Pass, Replica, Setup, dense
from .mutations import Program, Statement


class Unclear(Exception):
    """The rules do not say what a statement does at its place, or the wrapper must refuse it."""


@dataclass
class Unit:
    """Parameters that are combined together: those of one optimizer or of one module."""

    keys: set[str]
    passes: dict[int, Counter[str]]
    """For each rank, how many backwards have reached a parameter since it was last combined."""
    since_step: set[str] = field(default_factory=set)
    """Those that were combined since the last step."""
    is_first: bool = False
    """Whether the next combination is the first one since a step."""
    left_out: set[str] = field(default_factory=set)
    """Those that no backward has reached since the last step."""

    def pending(self) -> set[str]:
        """Return those that a backward on some rank has reached since they were last combined."""
        return {key for passes in self.passes.values() for key, count in passes.items() if count}


class Oracle:
    """The copies of the script, and what each unit has left to combine."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.replicas = [Replica(setup, rank) for rank in range(setup.size)]
        self.members = [self.replicas[rank] for rank in setup.ranks]
        self.trained: dict[int, set[str]] = {rank: set() for rank in setup.ranks}
        """For each rank, the parameters that have required a gradient at a backward or step."""
        is_module = setup.style == "module"
        models = range(setup.num_models)
        keys = list(self.replicas[0].params)
        shares = (
            [[key for key in keys if key.startswith(f"{model}.")] for model in models]
            if is_module
            else self.replicas[0].shares()
        )
        self.units = [
            Unit(set(share), {rank: Counter() for rank in setup.ranks}, is_first=not is_module) for share in shares
        ]

    def perform(self, statement: Statement) -> None:
        """Run a statement on all ranks. Raises Unclear before any number has changed."""
        unit = None
        for replica in self.replicas:
            replica.mark(statement)
        for replica in self.members if statement.one is not None or statement.stepped is not None else ():
            required = {key for key, param in replica.params.items() if param.requires_grad}
            self.trained[replica.rank] |= required
        if statement.one is not None:
            self.check_pass(statement.one)
        elif statement.stepped is not None and self.setup.style == "optimizer":
            unit = self.units[statement.stepped]
            left = unit.left_out if self.have_numbers(unit.left_out) else set()
            if unit.is_first or unit.pending() or left:
                self.check_sums(unit, {})
                self.combine(unit, left, in_step=True)
            self.fill(unit)
        elif statement.added is not None and self.setup.style == "optimizer":
            number, prefix = statement.added
            keys = {key for key in self.replicas[0].params if key.startswith(prefix)}
            self.units[number].keys |= keys
        reached = {}
        if statement.one is not None:
            reached = {replica.rank: replica.reached(statement.one, replica.rank) for replica in self.members}
        for replica in self.replicas:
            if statement.runs_on(replica.rank):
                replica.act(statement)
        if statement.one is not None:
            self.count(statement.one, reached)
        if unit is not None:
            unit.since_step.clear()
            unit.is_first = True

    def check_pass(self, one: Pass) -> None:
        if one.again and any(replica.graph is None for replica in self.replicas):
            raise Unclear("no graph")
        reached = {replica.rank: replica.reached(one, replica.rank) for replica in self.members}
        for unit in self.units:
            self.check_sums(unit, reached)
            combines = {self.combines(unit, rank, one.syncs, keys) for rank, keys in reached.items()}
            if len(combines) > 1:
                raise Unclear("some ranks combine")

    def check_sums(self, unit: Unit, reached: Mapping[int, frozenset[str]]) -> None:
        """Raise Unclear if a gradient would be summed that was combined since the last step, or set after that.

        The wrapper cannot tell these apart. Horovod refuses them both: it raises in a second backward before the step.
        """
        if not self.setup.sums:
            return
        for key in unit.since_step & unit.pending().union(*reached.values()):
            for replica in self.members:
                grad = replica.params[key].grad
                if grad is not None and not unit.passes[replica.rank][key] and bool(dense(grad).any()):
                    raise Unclear("a combined gradient is summed again")

    def combines(self, unit: Unit, rank: int, syncs: bool, reached: frozenset[str]) -> bool:
        """Return whether a backward combines that is going to reach parameters on a rank."""
        if not syncs:
            return False
        return any(unit.passes[rank][key] + 1 >= self.setup.passes for key in reached & unit.keys)

    def count(self, one: Pass, reached: dict[int, frozenset[str]]) -> None:
        for unit in self.units:
            combines = any(self.combines(unit, rank, one.syncs, keys) for rank, keys in reached.items())
            for rank, keys in reached.items():
                unit.passes[rank].update(keys & unit.keys)
            if combines:
                self.combine(unit)

    def have_numbers(self, keys: Iterable[str]) -> bool:
        """Return whether some of these gradients has an element other than 0 on some rank."""
        grads = [replica.params[key].grad for replica in self.members for key in keys]
        return any(grad is not None and bool(dense(grad).any()) for grad in grads)

    @torch.no_grad()
    def combine(self, unit: Unit, left: Set[str] = frozenset(), *, in_step: bool = False) -> None:
        reached = unit.pending()
        left_out = set() if in_step and unit.is_first else self.may_be_set(unit.keys - reached)
        waiting = left_out if self.setup.sums or self.setup.comm_hook else set()
        for key in sorted(unit.keys - waiting if unit.is_first else unit.keys & (reached | left)):
            params = [replica.params[key] for replica in self.members]
            if all(param.grad is None for param in params):
                continue
            total: Any = torch.zeros_like(params[0])
            for param in params:
                if param.grad is not None:
                    total = total + (param.grad.to_dense() if param.grad.is_sparse else param.grad)
            total = total if self.setup.sums else total / len(params)
            for param in params:
                write(param, total, sparse=self.members[0].is_sparse(key))
            unit.since_step.add(key)
        unit.left_out = left_out if unit.is_first else left_out & unit.left_out
        unit.is_first = False
        for passes in unit.passes.values():
            passes.clear()

    def may_be_set(self, unreached: Set[str]) -> set[str]:
        """Return those that a rank trains; not those that are there on a rank that has never trained them."""
        others = {
            key
            for one in self.members
            for key in unreached - self.trained[one.rank]
            if one.params[key].grad is not None
        }
        return {key for key in unreached - others if any(key in own for own in self.trained.values())}

    @torch.no_grad()
    def fill(self, unit: Unit) -> None:
        for replica in self.members:
            for key, param in replica.params.items():
                if param.requires_grad and param.grad is None and key in unit.keys - unit.since_step:
                    param.grad = torch.zeros_like(param)


def write(param: torch.Tensor, combined: torch.Tensor, *, sparse: bool) -> None:
    """Make numbers the gradient of `param`, in the memory that is there."""
    if sparse and (param.grad is None or param.grad.is_sparse):
        param.grad = combined.to_sparse(1)
    elif param.grad is None:
        param.grad = combined.clone()
    else:
        param.grad.copy_(combined)


@dataclass(frozen=True)
class Expected:
    """The statements of a program that the rules explain, and what one rank must have after each."""

    program: Program
    snapshots: Sequence[dict[str, Any]]
    state: dict[str, Any]
    """The optimizers' state in the end."""


def expected(program: Program, rank: int) -> Expected:
    oracle = Oracle(program.setup)
    own = oracle.replicas[rank]
    statements, snapshots = [], []
    for statement in program.statements:
        try:
            oracle.perform(statement)
        except Unclear:
            continue
        statements.append(statement)
        snapshots.append(own.snapshot())
    return Expected(Program(program.setup, tuple(statements)), snapshots, own.state())


def tolerance(setup: Setup) -> tuple[float, float]:
    """Return the relative and the absolute error that rounding explains."""
    if setup.compression != "none":
        return 1e-2, 2e-2
    return (1e-9, 1e-10) if setup.dtype is torch.float64 else (1e-3, 1e-4)


def difference(setup: Setup, found: dict[str, Any], wanted: dict[str, Any]) -> tuple[str, str] | None:
    """Return what differs first, in short and in full; None if nothing does."""
    relative, absolute = tolerance(setup)
    for name, want in wanted.items():
        got = found.get(name)
        if isinstance(want, bool):
            if want and not got:
                return kind_of(name), f"{name}: must be true, but is {got}"
            continue
        if want is None or got is None:
            if want is not got:
                lacks = "None, wanted numbers" if got is None else "numbers, wanted None"
                return f"{kind_of(name)}: {lacks}", f"{name}: got {lacks}"
            continue
        limit = absolute
        if setup.compression != "none" and want.numel():
            limit *= max(1.0, float(want.abs().max()))  # sums lose digits
        if got.shape != want.shape or not torch.allclose(got, want, relative, limit, equal_nan=True):
            wrong = ~torch.isclose(got, want, relative, limit) if got.shape == want.shape else ...
            numbers = f"got {got[wrong][:4].tolist()}, wanted {want[wrong][:4].tolist()}"
            return kind_of(name), f"{name}: {numbers}, of {want.numel()} numbers"
    if extra := sorted(name for name in found.keys() - wanted.keys() if found[name] is not False):
        return kind_of(extra[0]), f"{extra[0]}: got {found[extra[0]]}, wanted nothing"
    return None


def kind_of(name: str) -> str:
    """Return what the name of a difference is about, without the parameter."""
    for kind in ("kept", "state", "flat buffer"):
        if kind in name:
            return kind
    return name.partition(".grad")[1:][0] + name.partition(".grad")[2] or "parameter"
