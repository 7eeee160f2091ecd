"""One rank of a training script: its set-up, its models, and what the script keeps. It trains alone.

tests/parity/mutation_wrappers.py has the subclass that trains with the other ranks, through dualdist.
"""

from __future__ import annotations

import contextlib
import random
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

WIDTH = 12
PARTS = tuple("conv norm embedding tied frozen some complex empty scalar unused late".split())
"""Parts of the model that a set-up may have. `body` and `head` are always there, and every backward reaches them."""


@dataclass(frozen=True)
class Setup:
    """What the script has before its first step, equal on all ranks."""

    seed: int
    style: str
    """optimizer or module"""
    size: int
    dtype: torch.dtype
    parts: tuple[str, ...]
    some_ranks: tuple[int, ...]
    """The ranks that use the part `some`."""
    sparse: bool
    checkpoint: Mapping[str, bool]
    """Parts that are called through torch.utils.checkpoint, each with `use_reentrant`."""
    num_models: int
    num_optimizers: int
    """Of each model."""
    optimizer: str
    options: Mapping[str, Any]
    """Of the torch optimizer."""
    equal_start: bool
    """Whether the parameters are made equal: by hvd.broadcast_parameters in the style `optimizer`."""
    members: tuple[int, ...] | None
    """The ranks of the process set; None: all."""
    sums: bool
    passes: int
    predivide: float
    groups: str | int | None
    """A number, or `lists`."""
    compression: str
    comm_hook: bool
    sparse_as_dense: bool
    bucket_cap_mb: float | None
    hooks: tuple[tuple[str, str, str], ...]
    """Hooks that are registered before wrapping and after it: (when, kind, key of the parameter)."""
    head_first: bool = False
    """Whether the parts are registered in the order in which backward reaches them, the last one first."""

    @property
    def ranks(self) -> tuple[int, ...]:
        return self.members if self.members is not None else tuple(range(self.size))

    def lines(self) -> list[str]:
        """Return the set-up in readable lines, without what is as usual."""
        usual = ("{}", "1", "1.0", "None", "False", "'none'", "()")
        always = ("seed", "parts", "some_ranks", "equal_start")
        return [f"{name}: {value}" for name, value in vars(self).items() if name in always or repr(value) not in usual]


def draw_setup(draw: random.Random, seed: int, style: str, size: int) -> Setup:
    """Draw a set-up that dualdist accepts."""

    def chance(probability: float) -> bool:
        return draw.random() < probability

    is_module = style == "module"
    parts = tuple(part for part in PARTS if chance(0.4))
    sparse = "embedding" in parts and chance(0.5)
    adam = not sparse and chance(0.4)
    foreach = draw.choice([None, True, False])
    options: dict[str, Any] = {"lr": 0.02 if adam else 0.1, "foreach": foreach}
    if adam:
        options["eps"] = 1e-3  # rounding must not decide the direction of a step
    elif not sparse and chance(0.6):
        options["momentum"] = 0.9
    if not sparse and chance(0.3):
        options["weight_decay"] = 0.1
    sums = not is_module and chance(0.3)
    members = draw.choice([(0, 1), (0, 2), (1, 2)]) if size == 3 and chance(0.25) else None
    comm_hook = not sums and not sparse and members is None and chance(0.15)
    compression = "none"
    passes = 1 if is_module else draw.choice([1, 1, 2, 3])
    if not (is_module or comm_hook or adam or sums) and passes == 1 and chance(0.2):
        options["lr"] = 0.001
        compression = "fp16"  # sums of bf16 may have lost all digits
    predivide = 1.0
    if not (is_module or sums or comm_hook) and chance(0.15):
        predivide = 2.0
    groups: Any = None
    if not is_module and chance(0.5):
        groups = draw.choice([1, 2, 3, 8, "lists"])
    num_models = 2 if chance(0.25) else 1
    setup = Setup(
        seed=seed,
        style=style,
        size=size,
        dtype=torch.float32 if chance(0.2) else torch.float64,
        parts=parts,
        some_ranks=tuple(rank for rank in range(size) if chance(0.5)),
        sparse=sparse,
        checkpoint={part: chance(0.5) for part in parts if part in ("conv", "tied", "norm", "some") and chance(0.25)},
        num_models=num_models,
        num_optimizers=2 if num_models == 1 and chance(0.25) else 1,
        optimizer="Adam" if adam else "SGD",
        options=options,
        equal_start=is_module or chance(0.7),
        members=members,
        sums=sums,
        passes=passes,
        predivide=predivide,
        groups=groups,
        compression=compression,
        comm_hook=comm_hook,
        sparse_as_dense=sparse and not is_module and chance(0.3),
        bucket_cap_mb=1e-4 if is_module and chance(0.5) else None,
        hooks=(),
    )
    keys = [key for key in Replica.keys_of(setup) if not key.endswith("unused")]
    hooks = [
        (draw.choice(["before", "after"]), draw.choice(HOOK_KINDS), draw.choice(keys))
        for _ in range(draw.choice([0, 0, 0, 1, 2]))
    ]
    # Hooks call torch's collectives themselves, in an order that ranks which leave out parts of one optimizer change.
    comm_hook = comm_hook and setup.num_models == setup.num_optimizers == 1
    changed = {"hooks": tuple(hooks), "comm_hook": comm_hook, "head_first": chance(0.5)}
    return Setup(**{**vars(setup), **changed})


HOOK_KINDS = ("register_hook", "scales", "replaces", "node")
"""A tensor hook, post-accumulate hooks that scale .grad or replace it, and a hook of the node that accumulates."""


def seeded(*names: object) -> torch.Generator:
    """Return a generator whose numbers follow from `names`."""
    return torch.Generator().manual_seed(random.Random(repr(names)).getrandbits(60))


class Net(nn.Module):
    """A body, some parts after it, and a head; the loss is a mean over the batch."""

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def __init__(self, setup: Setup) -> None:
        super().__init__()
        self.setup = setup
        self.body = nn.Linear(WIDTH, WIDTH)
        makers: dict[str, Callable[[], Any]] = {
            "conv": lambda: nn.Conv2d(3, 4, 2),
            "norm": lambda: nn.LayerNorm(WIDTH),
            "embedding": lambda: nn.Embedding(7, WIDTH, sparse=setup.sparse),
            "tied": lambda: nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)]),
            "frozen": lambda: nn.Linear(WIDTH, WIDTH),
            "some": lambda: nn.Linear(WIDTH, WIDTH),
            "complex": lambda: nn.Parameter(torch.zeros(3, dtype=torch.complex128)),
            "empty": lambda: nn.Parameter(torch.zeros(0, 3)),
            "scalar": lambda: nn.Parameter(torch.zeros(())),
            "unused": lambda: nn.Parameter(torch.zeros(3, 4)),
            "late": lambda: nn.Linear(WIDTH, WIDTH),
        }
        for part in setup.parts:
            setattr(self, part, makers[part]())
        if "tied" in setup.parts:
            self.tied[1].weight = self.tied[0].weight
        self.head = nn.Linear(WIDTH, 3)
        if setup.head_first:
            self._modules = dict(reversed(self._modules.items()))
        self.double() if setup.dtype is torch.float64 else self.float()  # these leave complex numbers
        if "complex" in setup.parts and setup.dtype is torch.float32:
            self.complex = nn.Parameter(torch.zeros(3, dtype=torch.complex64))
        if "frozen" in setup.parts:
            self.frozen.requires_grad_(False)

    def forward(self, inputs: torch.Tensor, index: torch.Tensor, parts: Sequence[str]) -> torch.Tensor:
        hidden = self.body(inputs).tanh()
        for part in parts:
            if part in self.setup.checkpoint:
                reentrant = self.setup.checkpoint[part]
                hidden = checkpoint(self.adding(part), hidden, use_reentrant=reentrant)
            elif part == "embedding":
                hidden = hidden + self.embedding(index)
            else:
                hidden = self.adding(part)(hidden)
        out: torch.Tensor = self.head(hidden)
        return (out - inputs[:, :3]).square().mean()

    def adding(self, part: str) -> Callable[[torch.Tensor], Any]:
        """Return what adds the output of a part to its input."""
        return getattr(self, f"add_{part}", lambda hidden: hidden + getattr(self, part)(hidden))

    def add_conv(self, hidden: torch.Tensor) -> Any:
        return hidden + self.conv(hidden.view(-1, 3, 2, 2)).flatten(1).repeat(1, 3)

    def add_tied(self, hidden: torch.Tensor) -> Any:
        first, second = self.tied
        return hidden + second(first(hidden).tanh())

    def add_complex(self, hidden: torch.Tensor) -> Any:
        return hidden + (self.complex * self.complex.conj()).real.sum()

    def add_empty(self, hidden: torch.Tensor) -> Any:
        return hidden + self.empty.sum()

    def add_scalar(self, hidden: torch.Tensor) -> Any:
        return hidden * (1 + self.scalar)


@dataclass(frozen=True)
class Pass:
    """A backward, on all ranks."""

    number: int
    """Decides the data."""
    models: tuple[int, ...]
    skipped: Mapping[int, tuple[str, ...]]
    """For each rank, the parts that it leaves out."""
    inputs: tuple[str, ...] | None
    """Keys of the parameters that backward is restricted to."""
    retains: bool
    again: bool
    """Whether it uses the last graph, which was retained."""
    syncs: bool

    def __str__(self) -> str:
        nets = " + ".join(f"net{model}(data {self.number})" for model in self.models)
        options = [f"inputs={list(self.inputs)}"] if self.inputs is not None else []
        options += ["retain_graph=True"] if self.retains else []
        text = f"{'the same loss' if self.again else nets}.backward({', '.join(options)})"
        skipped = {rank: parts for rank, parts in self.skipped.items() if parts}
        text += f", ranks leave out {skipped}" if skipped and not self.again else ""
        return text + ("" if self.syncs else ", in no_sync()")


class Replica:
    """One rank's script, in plain torch."""

    def __init__(self, setup: Setup, rank: int) -> None:
        self.setup, self.rank = setup, rank
        self.nets = [Net(setup) for _ in range(setup.num_models)]
        source = setup.ranks[0] if setup.equal_start and rank in setup.ranks else rank
        own = rank if type(self) is not Replica else source  # a wrapper makes the parameters equal itself
        for key, param in self.params.items():
            numbers = torch.randn(
                param.shape,
                generator=seeded(setup.seed, own, key),
                dtype=torch.complex128 if param.is_complex() else torch.float64,
            )
            param.data.copy_(numbers * 0.3)
        made = getattr(torch.optim, setup.optimizer)
        self.optimizers: list[Any] = []
        for keys in self.shares():
            self.optimizers.append(made([self.params[key] for key in keys], **setup.options))
        self.kept: dict[str, torch.Tensor] = {}
        """Gradients that the script has kept in a list."""
        self.flat: torch.Tensor | None = None
        """A buffer of which the script made the gradients views."""
        self.graph: tuple[torch.Tensor, frozenset[str]] | None = None
        """The loss of the last pass if its graph was retained, and the parameters that it reaches."""
        self.uses_late = False
        self.nodes: list[Any] = []
        self.replaced = {key for _, kind, key in setup.hooks if kind == "replaces"}
        """Parameters whose gradients a hook replaces: they may get the memory of an earlier one by chance."""
        self.marks: dict[str, tuple[int, int, tuple[int, ...]]] = {}
        """What each gradient was before the current statement: id, address, strides."""
        for when in ("before", "after"):
            for at, kind, key in setup.hooks:
                if at == when:
                    self.add_hook(kind, self.params[key])
            if when == "before":
                self.wrap()

    # Names

    @staticmethod
    def keys_of(setup: Setup) -> list[str]:
        with torch.device("meta"):
            net = Net(setup)
        return [f"{number}.{name}" for number in range(setup.num_models) for name, _ in net.named_parameters()]

    @property
    def params(self) -> dict[str, nn.Parameter]:
        return {
            f"{number}.{name}": param for number, net in enumerate(self.nets) for name, param in net.named_parameters()
        }

    def shares(self) -> list[list[str]]:
        """Return the keys of the parameters of each optimizer when it is made. `late` is added later."""
        keys = [key for key in self.params if not key[2:].startswith("late")]
        if self.setup.num_optimizers == 1:
            return [[key for key in keys if int(key[0]) == number] for number in range(len(self.nets))]
        second = [key for place, key in enumerate(keys) if key.startswith("0.head") or (place % 3 == 2)]
        second = [key for key in second if not key.startswith("0.body")]
        return [[key for key in keys if key not in second], second]

    def is_sparse(self, key: str) -> bool:
        return self.setup.sparse and key.endswith("embedding.weight")

    # What the style changes

    def wrap(self) -> None:
        """Distribute the optimizers or models."""

    def call(self, number: int, *inputs: Any) -> torch.Tensor:
        loss: torch.Tensor = self.nets[number](*inputs)
        return loss

    def syncing(self, syncs: bool) -> contextlib.AbstractContextManager[Any]:
        """Return the context in which backward runs."""
        return contextlib.nullcontext()

    # Statements

    def reached(self, one: Pass, rank: int) -> frozenset[str]:
        """Return the keys of the parameters that a pass reaches on this replica."""
        if one.again:
            assert self.graph is not None
            keys = self.graph[1]
        else:
            prefixes = tuple(
                f"{model}.{part}" for model in one.models for part in ("body", "head", *self.used_parts(one, rank))
            )
            keys = frozenset(
                key
                for key, param in self.params.items()
                if param.requires_grad and f"{key}.".startswith(tuple(f"{prefix}." for prefix in prefixes))
            )
        return keys if one.inputs is None else keys & set(one.inputs)

    def used_parts(self, one: Pass, rank: int) -> list[str]:
        skipped = {"unused", *one.skipped[rank]}
        if rank not in self.setup.some_ranks:
            skipped.add("some")
        if not self.uses_late:
            skipped.add("late")
        return [part for part in self.setup.parts if part not in skipped]

    def loss(self, one: Pass) -> torch.Tensor:
        data = seeded(self.setup.seed, "data", one.number, self.rank)
        inputs = torch.randn(4, WIDTH, generator=data, dtype=torch.float64).to(self.setup.dtype)
        index = torch.randint(7, (4,), generator=data)
        losses = [self.call(number, inputs, index, self.used_parts(one, self.rank)) for number in one.models]
        return torch.stack(losses).sum() if len(losses) > 1 else losses[0]

    def backward(self, one: Pass) -> None:
        reached = self.reached(one, self.rank)
        inputs = None
        with self.syncing(one.syncs):
            loss = self.graph[0] if one.again and self.graph is not None else self.loss(one)
            if one.inputs is not None:
                inputs = [self.params[key] for key in one.inputs if key in reached]
            self.graph = (loss, reached) if one.retains else None
            loss.backward(inputs=inputs, retain_graph=one.retains)
            del loss

    def assign(self, one: Pass) -> None:
        """Compute gradients without backward, and set them by hand. No wrapper combines these."""
        params = [self.params[key] for key in sorted(self.reached(one, self.rank))]
        grads = torch.autograd.grad(self.loss(one), params)
        for param, grad in zip(params, grads, strict=True):
            param.grad = as_view(grad)

    def step(self, number: int) -> None:
        self.graph = None
        self.optimizers[number].step()

    def act(self, statement: Any) -> None:
        """Run a statement of mutations.py."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "grad and param do not obey the gradient layout contract")
            statement.act(self)

    def add_hook(self, kind: str, param: torch.Tensor) -> None:
        if kind == "register_hook":
            if param.requires_grad:
                param.register_hook(lambda grad: grad * 0.5)
            return

        def change(*_: object) -> None:
            assert param.grad is not None
            if kind == "replaces":
                param.grad = param.grad * 0.5
            else:
                param.grad.mul_(0.5)

        if kind == "node" and param.requires_grad:
            node: Any = param.expand_as(param).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
            node.register_hook(change)
            self.nodes.append(node)
        elif param.requires_grad:
            param.register_post_accumulate_grad_hook(change)

    # Comparison

    def mark(self, statement: Any) -> None:
        """Record where the gradients are before a backward or step, without references to them."""
        self.marks = {}
        if statement.one is None and statement.stepped is None:
            return
        self.marks = {
            key: (id(param.grad), param.grad.data_ptr(), param.grad.stride())
            for key, param in self.params.items()
            if param.grad is not None and not param.grad.is_sparse and key not in self.replaced
        }

    def snapshot(self) -> dict[str, Any]:
        """Return copies of all numbers, and facts about the memory of gradients, by name."""
        found: dict[str, Any] = {}
        for key, param in self.params.items():
            found[key] = param.detach().clone()
            grad = param.grad
            found[f"{key}.grad"] = None if grad is None else dense(grad).clone()
            if grad is None:
                continue
            if self.is_sparse(key):
                if not self.setup.sparse_as_dense:
                    found[f"{key}.grad.is_sparse"] = grad.is_sparse
                continue
            if key in self.marks:
                identity, address, stride = self.marks[key]
                found[f"{key}.grad is the same tensor as before"] = id(grad) == identity
                found[f"{key}.grad has the memory of before"] = grad.data_ptr() == address
                found[f"{key}.grad has the strides of before"] = grad.stride() == stride
            if key in self.kept:
                found[f"{key}.grad is the kept one"] = grad is self.kept[key]
            if self.flat is not None and grad.numel():
                found[f"{key}.grad lies in the flat buffer"] = lies_in(grad, self.flat)
        for key, grad in self.kept.items():
            found[f"kept {key}.grad"] = dense(grad).clone()
        if self.flat is not None:
            found["the flat buffer"] = self.flat.clone()
        return found

    def state(self) -> dict[str, Any]:
        """Return copies of the optimizers' states."""
        return {
            f"state of optimizer {number}, parameter {place}, {name}": torch.as_tensor(value).clone()
            for number, optimizer in enumerate(self.optimizers)
            for place, values in optimizer.state_dict()["state"].items()
            for name, value in values.items()
            if value is not None
        }


def as_view(grad: Any) -> Any:
    """Return a tensor that is going to be a gradient and may be a view, with a mark: torch refuses `detach_` on it."""
    grad.may_be_view = True
    return grad


def dense(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.to_dense() if tensor.is_sparse else tensor).detach()


def lies_in(tensor: torch.Tensor, memory: torch.Tensor) -> bool:
    return tensor.untyped_storage().data_ptr() == memory.untyped_storage().data_ptr()
