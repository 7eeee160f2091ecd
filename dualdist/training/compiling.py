"""Code that torch.compile must not compile: communication, which uses call sites, locks and threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

from torch._compile import _disable_dynamo

__all__ = ("not_compiled",)

P = ParamSpec("P")
T = TypeVar("T")


def not_compiled(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function that stays uncompiled when a compiled model calls it.

    The same as torch.compiler.disable, but it imports the compiler only at the first call, as in torch.optim.
    """
    return cast("Callable[P, T]", _disable_dynamo(function))
