"""Random training scripts that change gradients, parameters and optimizers between and around backwards and steps.

A program is a set-up and statements. A statement acts on one rank's script (mutation_model.py), whatever wraps it.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .mutation_model import Pass, Replica, Setup, as_view, draw_setup


@dataclass(frozen=True)
class Statement:
    """A statement of the script."""

    text: str
    kind: str
    """The name by which failures are counted: pass, step, zero, ..."""
    act: Callable[[Replica], None]
    ranks: tuple[int, ...] | None = None
    """The ranks that it runs on; None: all."""
    one: Pass | None = None
    stepped: int | None = None
    """The number of the optimizer that steps."""
    added: tuple[int, str] | None = None
    """The optimizer that gets parameters, and the prefix of their keys."""

    def runs_on(self, rank: int) -> bool:
        return self.ranks is None or rank in self.ranks

    def __str__(self) -> str:
        return self.text + ("" if self.ranks is None else f" on rank {', '.join(map(str, self.ranks))} alone")


@dataclass(frozen=True)
class Program:
    """A set-up and the statements after it."""

    setup: Setup
    statements: tuple[Statement, ...]

    def __str__(self) -> str:
        lines = [f"{place:3} {statement}" for place, statement in enumerate(self.statements)]
        return "\n".join(["set-up:", *(f"    {line}" for line in self.setup.lines()), *lines])


# What changes the gradient of one parameter `p`; `x` is a number. Called only if there is a gradient.

One = Callable[[Any, float], Any]


def set_grad(param: Any, grad: torch.Tensor | None) -> None:
    param.grad = grad


def set_data(param: Any, data: torch.Tensor) -> None:
    param.grad.data = data


def delete(param: Any, _: float) -> None:
    del param.grad


ONE: Mapping[str, One] = {
    "p.grad.mul_(x)": lambda p, x: p.grad.mul_(x),
    "p.grad = p.grad.clone()": lambda p, _: set_grad(p, p.grad.clone()),
    "p.grad = p.grad * x": lambda p, x: set_grad(p, p.grad * x),
    "p.grad.zero_()": lambda p, _: p.grad.zero_(),
    "p.grad = None": lambda p, _: set_grad(p, None),
    "del p.grad": delete,
}
"""Also for sparse gradients."""
DENSE: Mapping[str, One] = {
    "p.grad.add_(x)": lambda p, x: p.grad.add_(x),
    "p.grad.clamp_(-0.05, 0.05)": lambda p, _: None if p.is_complex() else p.grad.clamp_(-0.05, 0.05),
    "p.grad.data = torch.full_like(p.grad, x)": lambda p, x: set_data(p, torch.full_like(p.grad, x)),
    "p.grad.data = p.grad.data * x": lambda p, x: set_data(p, p.grad.data * x),
    "p.grad.data = p.grad.data.clamp(-5, 5)": lambda p, _: (
        None if p.is_complex() else set_data(p, p.grad.data.clamp(-5, 5))
    ),
    "p.grad.set_(p.grad * x)": lambda p, x: p.grad.set_(p.grad * x),
    "p.grad.data.zero_()": lambda p, _: p.grad.data.zero_(),
    "p.grad.data.mul_(x)": lambda p, x: p.grad.data.mul_(x),
}


def only_dense(replica: Replica, keys: Sequence[str] | None = None) -> dict[str, Any]:
    """Return parameters whose gradients are never sparse, of `keys`."""
    return {
        key: param
        for key, param in replica.params.items()
        if not replica.is_sparse(key) and (keys is None or key in keys)
    }


def one_dtype(replica: Replica) -> dict[str, Any]:
    """Return parameters with dense gradients of one dtype."""
    return {key: param for key, param in only_dense(replica).items() if not param.is_complex()}


def give_other_strides(replica: Replica, keys: Sequence[str], x: float) -> None:
    for param in only_dense(replica, keys).values():
        if param.grad is None:
            continue
        if param.dim() >= 2:
            grad = param.grad.transpose(0, 1).contiguous().transpose(0, 1)
        else:
            grad = torch.zeros(param.numel() * 2, dtype=param.dtype)[::2].view(param.shape).copy_(param.grad)
        param.grad = as_view(grad)


def detach(replica: Replica, keys: Sequence[str], x: float) -> None:
    for param in only_dense(replica, keys).values():
        if param.grad is not None and not hasattr(param.grad, "may_be_view"):
            param.grad.detach_()


def set_new(replica: Replica, keys: Sequence[str], x: float) -> None:
    for param in only_dense(replica, keys).values():
        param.grad = torch.full_like(param, x / 10 * (replica.rank + 1))


def copy_new(replica: Replica, keys: Sequence[str], x: float) -> None:
    for param in only_dense(replica, keys).values():
        if param.grad is None:
            param.grad = torch.zeros_like(param)
        param.grad.copy_(torch.full_like(param, x / 10 * (replica.rank + 1)))


def swap(replica: Replica, keys: Sequence[str], x: float) -> None:
    """Swap the gradients of each two parameters of one shape."""
    waiting: dict[torch.Size, Any] = {}
    for param in one_dtype(replica).values():
        other = waiting.pop(param.shape, None)
        if other is None:
            waiting[param.shape] = param
        else:
            param.grad, other.grad = other.grad, param.grad


# What changes all gradients or parameters of the script.


def make_flat(replica: Replica, keys: Sequence[str], x: float) -> None:
    params = one_dtype(replica)
    replica.flat = torch.zeros(sum(param.numel() for param in params.values()), dtype=replica.setup.dtype)
    start = 0
    for param in params.values():
        view = replica.flat[start : start + param.numel()].view(param.shape)
        if param.grad is not None:
            view.copy_(param.grad)
        param.grad = as_view(view)
        start += param.numel()


def put_back(replica: Replica, keys: Sequence[str], x: float) -> None:
    params = [param for param in one_dtype(replica).values() if param.grad is not None]
    if not params:
        return
    flat = torch.cat([param.grad.reshape(-1) for param in params]) * x
    start = 0
    for param in params:
        param.grad.data = flat[start : start + param.numel()].view(param.shape)
        start += param.numel()


def keep(replica: Replica, keys: Sequence[str], x: float) -> None:
    replica.kept = {
        key: param.grad
        for key, param in replica.params.items()
        if param.grad is not None and not replica.is_sparse(key)
    }


def drop(replica: Replica, keys: Sequence[str], x: float) -> None:
    replica.kept = {}


def free_storage(replica: Replica, keys: Sequence[str], x: float) -> None:
    if replica.kept or replica.flat is not None:
        return
    for param in only_dense(replica).values():
        if param.grad is not None:
            storage = param.grad.untyped_storage()
            if storage.resizable():  # memory that processes share is not
                storage.resize_(0)
            param.grad = None


GRADIENTS: Mapping[str, Callable[[Replica, Sequence[str], float], None]] = {
    "p.grad = the same with other strides": give_other_strides,
    "p.grad.detach_()": detach,
    "p.grad = torch.full_like(p, x / 10 * (rank + 1))": set_new,
    "p.grad.copy_(torch.full_like(p, x / 10 * (rank + 1)))": copy_new,
    "swap the gradients of parameters of one shape": swap,
    "make all gradients views of a new flat buffer": make_flat,
    "cat all gradients, multiply by x, put them back by p.grad.data": put_back,
    "kept = [p.grad for all p]": keep,
    "del kept": drop,
    "p.grad.untyped_storage().resize_(0); p.grad = None for all p": free_storage,
}


def vector(replica: Replica, keys: Sequence[str], x: float) -> None:
    params = [param for param in one_dtype(replica).values() if param.is_contiguous()]
    with torch.no_grad():
        nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(params) * 0.9, params)


def channels_last(replica: Replica, keys: Sequence[str], x: float) -> None:
    for net in replica.nets:
        net.to(memory_format=torch.channels_last)


def convert(replica: Replica, keys: Sequence[str], x: float) -> None:
    for net in replica.nets:
        if replica.setup.dtype is torch.float64:
            net.float().double()
        else:
            net.double().float()


def load_model(replica: Replica, keys: Sequence[str], x: float) -> None:
    factor = 1.0 if x < 0 else 0.9
    for net in replica.nets:
        net.load_state_dict({name: value * factor for name, value in net.state_dict().items()})


def load_optimizer(replica: Replica, keys: Sequence[str], x: float) -> None:
    for optimizer in replica.optimizers:
        optimizer.load_state_dict(optimizer.state_dict())


def clone_data(replica: Replica, keys: Sequence[str], x: float) -> None:
    for key in keys:
        replica.params[key].data = replica.params[key].data.clone()


def copy_data(replica: Replica, keys: Sequence[str], x: float) -> None:
    for key in keys:
        data = replica.params[key].data
        data.copy_(data * 0.9)


def share_memory(replica: Replica, keys: Sequence[str], x: float) -> None:
    for key in keys:
        if replica.params[key].numel():
            replica.params[key].share_memory_()


def change_rate(replica: Replica, keys: Sequence[str], x: float) -> None:
    for optimizer in replica.optimizers:
        for group in optimizer.param_groups:
            group["lr"] *= 0.7


PARAMETERS: Mapping[str, Callable[[Replica, Sequence[str], float], None]] = {
    "vector_to_parameters(parameters_to_vector(all p) * 0.9, all p)": vector,
    "model.to(memory_format=torch.channels_last)": channels_last,
    "convert the model to the other dtype and back": convert,
    "model.load_state_dict(the same values if x < 0, else 0.9 of them)": load_model,
    "optimizer.load_state_dict(optimizer.state_dict())": load_optimizer,
    "p.data = p.data.clone()": clone_data,
    "p.data.copy_(p.data * 0.9)": copy_data,
    "p.share_memory_()": share_memory,
    "multiply all learning rates by 0.7": change_rate,
}


def zero_optimizers(replica: Replica, to_none: bool) -> None:
    for optimizer in replica.optimizers:
        optimizer.zero_grad(set_to_none=to_none)


def zero_models(replica: Replica, to_none: bool) -> None:
    for net in replica.nets:
        net.zero_grad(set_to_none=to_none)


def zero_each(zero: Callable[[Any], None], replica: Replica) -> None:
    for key, param in replica.params.items():
        if param.grad is not None:
            if replica.is_sparse(key):
                param.grad = None
            else:
                zero(param)


def zero_new(param: Any) -> None:
    param.grad = torch.zeros_like(param)


ZEROS: Mapping[str, Callable[[Replica], None]] = {
    "optimizer.zero_grad()": lambda replica: zero_optimizers(replica, True),
    "optimizer.zero_grad(set_to_none=False)": lambda replica: zero_optimizers(replica, False),
    "model.zero_grad()": lambda replica: zero_models(replica, True),
    "model.zero_grad(set_to_none=False)": lambda replica: zero_models(replica, False),
    "p.grad = None for all p": lambda replica: zero_each(lambda p: set_grad(p, None), replica),
    "p.grad.zero_() for all p": lambda replica: zero_each(lambda p: p.grad.zero_(), replica),
    "p.grad.data.zero_() for all p": lambda replica: zero_each(lambda p: p.grad.data.zero_(), replica),
    "p.grad = torch.zeros_like(p) for all p": lambda replica: zero_each(zero_new, replica),
}


def clip_norm(replica: Replica) -> None:
    nn.utils.clip_grad_norm_(only_dense(replica).values(), 0.5)


def clip_value(replica: Replica) -> None:
    params = [param for param in one_dtype(replica).values() if param.grad is not None]
    if params:  # torch refuses none
        nn.utils.clip_grad_value_(params, 0.1)


def freeze(replica: Replica, part: str, required: bool) -> None:
    replica.graph = None
    for net in replica.nets:
        getattr(net, part).requires_grad_(required)


def add_late(replica: Replica, number: int) -> None:
    replica.optimizers[number].add_param_group({"params": [*replica.nets[number].late.parameters()]})
    replica.uses_late |= number == len(replica.nets) - 1


def on_parameters(
    act: Callable[[Replica, Sequence[str], float], None], keys: Sequence[str], x: float
) -> Callable[[Replica], None]:
    def change(replica: Replica) -> None:
        replica.graph = None
        act(replica, keys, x)

    return change


def on_gradients(
    act: Callable[[Replica, Sequence[str], float], None], keys: Sequence[str], x: float
) -> Callable[[Replica], None]:
    return lambda replica: act(replica, keys, x)


def on_each(act: One, keys: Sequence[str], x: float, sparse: bool) -> Callable[[Replica], None]:
    def change(replica: Replica) -> None:
        for key in keys:
            param = replica.params[key]
            if param.grad is not None and (sparse or not replica.is_sparse(key)):
                act(param, x)

    return change


class Drawing:
    """Draws the statements of a program."""

    def __init__(self, setup: Setup, draw: random.Random) -> None:
        self.setup, self.draw = setup, draw
        self.keys = Replica.keys_of(setup)
        self.statements: list[Statement] = []
        self.num_passes = 0
        self.late = "late" in setup.parts

    def chance(self, probability: float) -> bool:
        return self.draw.random() < probability

    def add(self, text: str, kind: str, act: Callable[[Replica], None], **options: Any) -> None:
        self.statements.append(Statement(text, kind, act, **options))

    def program(self) -> Program:
        for _ in range(self.draw.choice([2, 3, 4])):
            self.add_step()
        return Program(self.setup, tuple(self.statements))

    def add_step(self) -> None:
        if self.chance(0.8):
            text = self.draw.choice(list(ZEROS))
            self.add(text, "zero", ZEROS[text])
        self.mutate(0.4)
        usual = self.setup.passes if self.setup.style == "optimizer" else self.draw.choice([1, 1, 2])
        count = usual if self.chance(0.8) else self.draw.choice([0, 1, usual + 1])
        if self.setup.sums:
            count = min(count, usual)
        for _ in range(count):
            self.add_pass()
            self.mutate(0.5)
        if self.setup.style == "module" and self.chance(0.1):
            self.add_assignment()
            self.mutate(0.3)
        if self.setup.style == "optimizer" and self.chance(0.4):
            self.set_beside()
        if self.chance(0.25):
            self.add("clip_grad_norm_", "clip", clip_norm)
        elif self.chance(0.15):
            self.add("clip_grad_value_", "clip", clip_value)
        if self.chance(0.9):
            for number in range(self.setup.num_models * self.setup.num_optimizers):

                def step(replica: Replica, number: int = number) -> None:
                    replica.step(number)

                self.add(f"optimizer{number}.step()", "step", step, stepped=number)
        self.mutate(0.3)
        self.change_structure()

    def set_beside(self) -> None:
        """Set gradients beside those that backward makes, on some ranks: of parts that some or all do not use."""
        keys = [key for key in self.keys if key[2:].startswith(("unused", "some", "frozen", "scalar"))]
        if keys:
            text, x = (self.draw.choice([name for name in GRADIENTS if "rank" in name]), self.draw.choice([0.5, -0.75]))
            act = on_gradients(GRADIENTS[text], keys, x)
            self.add(f"{text} for {', '.join(keys)} with x = {x}", text, act, ranks=self.draw_ranks(0.4))

    def change_structure(self) -> None:
        if self.late and self.chance(0.4):
            self.late = False
            for number in range(self.setup.num_models):
                text = f"optimizer{number}.add_param_group(the parameters of net{number}.late)"

                def act(replica: Replica, number: int = number) -> None:
                    add_late(replica, number)

                self.add(text, "add_param_group", act, added=(number, f"{number}.late."))
        parts = [part for part in self.setup.parts if part not in ("unused", "late")]
        if parts and self.chance(0.15):
            part, required = self.draw.choice(parts), self.chance(0.4)

            def toggle(replica: Replica) -> None:
                freeze(replica, part, required)

            ranks = self.draw_ranks(0.2)
            self.add(f"model.{part}.requires_grad_({required})", "requires_grad_", toggle, ranks=ranks)

    def draw_ranks(self, alone: float) -> tuple[int, ...] | None:
        return (self.draw.randrange(self.setup.size),) if self.chance(alone) else None

    def mutate(self, probability: float) -> None:
        while self.chance(probability):
            x = self.draw.choice([0.5, 1.5, -0.75])
            many = len(self.keys) if self.chance(0.5) else self.draw.randint(1, 3)
            keys = sorted(self.draw.sample(self.keys, min(many, len(self.keys))))
            text = self.draw.choice([*ONE, *DENSE, *GRADIENTS, *PARAMETERS])
            options: dict[str, Any] = {"ranks": self.draw_ranks(0.3)}
            kind = text
            if text in PARAMETERS:
                act = on_parameters(PARAMETERS[text], keys, x)
            elif text in GRADIENTS:
                act = on_gradients(GRADIENTS[text], keys, x)
            else:
                act = on_each((ONE | DENSE)[text], keys, x, text in ONE)  # type: ignore[operator]
            if ("p." in text or "p)" in text) and "all p" not in text:
                text += f" for {'all p' if len(keys) == len(self.keys) else ', '.join(keys)}"
            text += f" with x = {x}" if re.search(r"\bx\b", kind) else ""
            self.add(text, kind, act, **options)

    def add_pass(self) -> None:
        setup = self.setup
        models = self.draw.choice([(0,), (1,), (0, 1)]) if setup.num_models == 2 else (0,)
        skipped: dict[int, tuple[str, ...]] = {rank: () for rank in range(setup.size)}
        if setup.parts and self.chance(0.4):
            some = tuple(self.draw.sample(setup.parts, self.draw.randint(1, min(2, len(setup.parts)))))
            for rank in skipped if self.chance(0.3) else [self.draw.randrange(setup.size)]:
                skipped[rank] = some
        inputs = None
        is_reentrant = any(setup.checkpoint.values())
        if not is_reentrant and self.chance(0.15):
            anchors = [f"{model}.{part}" for model in models for part in ("body.weight", "head.bias")]
            if setup.passes == 1 and self.chance(0.3):
                anchors = [self.draw.choice(anchors)]
            inputs = tuple(sorted({*anchors, *self.draw.sample(self.keys, len(self.keys) // 2)}))
        retains = self.chance(0.15)
        syncs = not self.chance(0.2)
        self.num_passes += 1
        one = Pass(self.num_passes, models, skipped, inputs, retains, False, syncs)
        self.add_one(one)
        if retains:
            self.mutate(0.3)
            self.add_one(Pass(self.num_passes, models, skipped, inputs, False, True, syncs))

    def add_assignment(self) -> None:
        if any(self.setup.checkpoint.values()):  # torch.autograd.grad cannot go through it
            return
        self.num_passes += 1
        skipped: dict[int, tuple[str, ...]] = {rank: () for rank in range(self.setup.size)}
        one = Pass(self.num_passes, (0,), skipped, None, False, False, True)
        text = f"p.grad = grad for grad in torch.autograd.grad(net0(data {one.number}), all p)"
        self.add(text, "autograd.grad", lambda replica: replica.assign(one))

    def add_one(self, one: Pass) -> None:
        self.add(str(one), "pass", lambda replica: replica.backward(one), one=one)


def draw_program(seed: int, style: str, size: int) -> Program:
    """Return the program of a seed, equal on all ranks. The oracle leaves out statements that mean nothing."""
    draw = random.Random(f"{seed} {style} {size}")
    return Drawing(draw_setup(draw, seed, style, size), draw).program()
