"""What torch.compile must leave alone: the ranks' talk, which looks at call sites, locks and threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

from torch._compile import _disable_dynamo

__all__ = ("not_compiled",)

P = ParamSpec("P")
T = TypeVar("T")


def not_compiled(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function that runs as it is also where a compiled model calls it.

    This is torch.compiler.disable as torch.optim uses it: the compiler is not imported before the first call.
    """
    return cast("Callable[P, T]", _disable_dynamo(function))
