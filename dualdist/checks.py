"""Checks of arguments. Each one returns the value, or raises an error that names the parameter.

Messages have one form: "`x` must be <rule>, but is {x} instead.", then what to do. A wrong type is a TypeError, a wrong
value a ValueError.
"""

from __future__ import annotations

import math
from typing import Any

from .types import REDUCE_OP_NAMES, Average, Max, Min, Product, Sum

__all__ = ("number", "reduce_op", "shown", "text_of", "wrong")

_LONGEST = 100
"""How many characters of a value a message shows."""

_TORCH_OPS = {"SUM": Sum, "AVG": Average, "MIN": Min, "MAX": Max, "PRODUCT": Product}
_TORCH_MODULES = ("torch._C._distributed_c10d", "torch.distributed.distributed_c10d")
"""Where the classes of torch's ops are. They are recognised by name, because torch.distributed may be missing."""


def shown(value: Any) -> str:
    """Return `value` as a message shows it: itself if it is plain, else its type."""
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        text = repr(value)
        return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
    kind = type(value)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def text_of(error: BaseException) -> str:
    """Return the text of `error`, whose class may be the user's."""
    try:
        return str(error)
    except Exception as another:
        return f"a text that cannot be shown, since its class raises {type(another).__name__}"


def wrong(name: str, rule: str, value: Any, fix: str = "", error: type[Exception] = ValueError) -> Exception:
    """Return the error for the parameter `name`, whose `value` breaks `rule`. fix: what to do."""
    return error(f"`{name}` must be {rule}, but is {shown(value)} instead.{' ' * bool(fix)}{fix}")


def number(name: str, value: Any) -> float:
    """Return `value` as a float. It must be a finite number, or convert to one as a tensor with one element does."""
    if type(value) is float and math.isfinite(value):
        return value
    rule, fix = "a finite number", "Pass a float."
    if isinstance(value, bool | str | bytes):
        raise wrong(name, rule, value, fix, TypeError)
    try:
        converted = float(value)
    except Exception as error:  # any class may raise anything
        raise wrong(name, rule, value, fix, TypeError) from error
    if not math.isfinite(converted):
        raise wrong(name, rule, value, fix)
    return converted


def reduce_op(op: Any) -> int:
    """Return Horovod's constant for `op`, which is one of these constants or of torch.distributed.ReduceOp."""
    if type(op) is int and 0 <= op < len(REDUCE_OP_NAMES):
        return op
    is_torch_op = type(op).__module__ in _TORCH_MODULES and type(op).__name__ in ("ReduceOp", "RedOpType")
    name = getattr(op, "op", op).name if is_torch_op else None
    if name in _TORCH_OPS:
        return _TORCH_OPS[name]
    raise ValueError(
        f"`op` must be {', '.join(REDUCE_OP_NAMES[:-1])} or {REDUCE_OP_NAMES[-1]}, but is "
        f"{f'torch.distributed.ReduceOp.{name}' if name else shown(op)} instead. Pass hvd.Sum and so on, or SUM, AVG, "
        "MIN, MAX or PRODUCT of torch.distributed.ReduceOp."
    )
