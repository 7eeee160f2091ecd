"""Optimizers of every class and dtype with state, one with odd state, and a comparison bit by bit."""

from __future__ import annotations

import inspect
from collections import OrderedDict, deque
from typing import Any, NamedTuple

import torch


class Pair(NamedTuple):
    left: Any
    right: Any


class Marked(torch.Tensor):
    """A tensor of a class of its own."""

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return self.clone()


class Odd(torch.optim.Optimizer):
    """Moves weights in float32, and keeps state of every kind beside them."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "lr_tensor": torch.tensor(lr, dtype=torch.float64)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        shared: torch.Tensor | None = None
        for group in self.param_groups:
            for number, param in enumerate(group["params"]):
                state = self.state[param]
                if not state:
                    state.update(_odd_state(param, number))
                    state["shared"] = state["shared"] if shared is None else shared
                shared = state["shared"]
                state["master"] -= group["lr"] * param.grad.float()
                state["count"] += 1
                param.copy_(state["master"])
        if shared is not None:
            shared += 1


def _odd_state(param: torch.Tensor, number: int) -> dict[str, Any]:
    numbers = param.detach().float()
    return {
        "master": torch.nn.Parameter(numbers.clone()),
        "trained": numbers.clone().requires_grad_(),
        "count": torch.tensor(2**40 + 1 + number),
        "mask": numbers > 0.5,
        "sparse": (numbers * (numbers > 0.5)).to_sparse(),
        "repeated": torch.sparse_coo_tensor(
            torch.tensor([[0, 0]]), torch.tensor([0.1, 0.2]).double(), (3,), check_invariants=False
        ),
        "marked": numbers.double().as_subclass(Marked),
        "scale": torch.tensor(1 / 3, dtype=torch.float64),
        "number": 1 / 3,
        "counted": True,
        "name": "weight",
        "bytes": b"weight",
        "nothing": None,
        "kind": torch.bfloat16,
        "complex": torch.full((2,), complex(1 / 3, number)).conj(),
        "transposed": torch.arange(6.0, dtype=torch.float64).reshape(2, 3).t(),
        "expanded": torch.full((1,), 1 / 3).expand(4),
        "empty": torch.empty(0, 3, dtype=torch.float16),
        "history": [numbers.double() / 3, (numbers.int(), None)],
        "nested": {"step": torch.tensor(3), "deeper": {"a": [numbers.double()]}},
        "ordered": OrderedDict(b=numbers.double(), a=1),
        "pair": Pair(numbers.double(), "right"),
        "recent": deque([numbers.double()], maxlen=2),
        "shared": torch.zeros((), dtype=torch.float64),
    }


_CLASSES: dict[str, Any] = {
    name: kind
    for name, kind in vars(torch.optim).items()
    if inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
} | {"Odd": Odd}
_OPTIONS: dict[str, dict[str, Any]] = {
    "SGD": {"momentum": 0.9},
    "Adam": {"amsgrad": True},
    "RMSprop": {"centered": True, "momentum": 0.5},
    "LBFGS": {"max_iter": 2},
}
KINDS = tuple(_CLASSES)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def params_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def step(optimizer: torch.optim.Optimizer, number: int) -> None:
    """Make a step with gradients that follow from the weights and `number`."""
    for param in params_of(optimizer):
        grad = torch.sin(param.detach() + number)
        param.grad = grad.to_sparse() if isinstance(optimizer, torch.optim.SparseAdam) else grad
    optimizer.step((lambda: torch.tensor(1.0)) if isinstance(optimizer, torch.optim.LBFGS) else None)  # type: ignore[arg-type]


def trained(kind: str, dtype: torch.dtype, seed: int, steps: int) -> torch.optim.Optimizer:
    """Return an optimizer of two matrices after `steps` steps. Its numbers follow from `seed`."""
    weights = torch.sin(torch.arange(24.0).reshape(2, 4, 3) + seed)
    optimizer: torch.optim.Optimizer = _CLASSES[kind](
        [torch.nn.Parameter(weight.to(dtype)) for weight in weights], lr=0.1 / (seed + 1), **_OPTIONS.get(kind, {})
    )
    for number in range(steps):
        step(optimizer, seed + number)
    return optimizer


def all_trained(seed: int, steps: int) -> dict[str, torch.optim.Optimizer]:
    """Return an optimizer of each class and dtype."""
    return {f"{kind} {dtype}": trained(kind, dtype, seed, steps) for kind in KINDS for dtype in DTYPES}


def difference(found: Any, expected: Any, where: str = "") -> str | None:
    """Return the first place where two values differ in type, layout or a bit; None: nowhere."""
    if type(found) is not type(expected):
        return f"{where} is a {type(found).__name__} instead of a {type(expected).__name__}"
    if isinstance(expected, torch.Tensor):
        problem = _tensor_difference(found, expected)
        return problem and f"{where} {problem}"
    if isinstance(expected, dict):
        if list(found) != list(expected):
            return f"{where} has {list(found)} instead of {list(expected)}"
        pairs = [(f"{where}[{key!r}]", found[key], expected[key]) for key in expected]
    elif isinstance(expected, list | tuple | deque):
        if len(found) != len(expected) or getattr(found, "maxlen", 0) != getattr(expected, "maxlen", 0):
            return f"{where} is {found} instead of {expected}"
        pairs = [(f"{where}[{place}]", *pair) for place, pair in enumerate(zip(found, expected, strict=True))]
    else:
        return None if found == expected else f"{where} is {found!r} instead of {expected!r}"
    return next((problem for name, left, right in pairs if (problem := difference(left, right, name))), None)


def _tensor_difference(found: torch.Tensor, expected: torch.Tensor) -> str | None:
    for name in ("dtype", "shape", "device", "layout", "requires_grad"):
        if getattr(found, name) != getattr(expected, name):
            return f"has the {name} {getattr(found, name)} instead of {getattr(expected, name)}"
    if expected.layout is torch.sparse_coo:
        if found.is_coalesced() != expected.is_coalesced():
            return f"has is_coalesced() {found.is_coalesced()}"
        parts = [(part._indices(), part._values()) for part in (found, expected)]
        return next(filter(None, map(_tensor_difference, *parts)), None)
    if expected.layout is torch.strided and found.stride() != expected.stride():
        return f"has the strides {found.stride()} instead of {expected.stride()}"
    if expected.layout is not torch.strided:
        found, expected = found.to_dense(), expected.to_dense()
    return None if torch.equal(_bytes(found), _bytes(expected)) else f"is {found} instead of {expected}"


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.detach().as_subclass(torch.Tensor).resolve_conj().resolve_neg()
    return plain.reshape(-1).contiguous().view(torch.uint8)
