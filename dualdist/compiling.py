"""Code that torch.compile must not compile: communication, which reads frames and uses locks and threads."""

from __future__ import annotations

import sys
from types import CodeType, FunctionType
from typing import Any, TypeVar

import torch

T = TypeVar("T")

_frames: Any = torch._C._dynamo.eval_frame


def _skip(code: CodeType) -> None:
    """Leave uncompiled what C++ calls while a compiled function runs."""
    if hasattr(_frames, "set_code_exec_strategy"):
        skip = _frames._FrameAction.SKIP
        _frames.set_code_exec_strategy(code, _frames._FrameExecStrategy(skip, skip))
    else:  # before torch 2.7, this leaves out the code alone, not what it calls
        _frames.skip_code(code)


def not_compiled(made: T) -> T:
    """Decorate a function, or a class for its methods: it stays uncompiled, with all that it calls.

    `torch.compiler.disable` does the same, but imports Dynamo, which takes longer than importing torch, and wraps each
    function in another one. These are the two settings that it makes: one for what compiled code calls, one for what
    C++ calls while a compiled function runs, such as the hooks of autograd.

    It must stand directly above `def`: it marks the code, which all functions share that another decorator has wrapped.
    """
    for member in vars(made).values() if isinstance(made, type) else (made,):
        function: Any = member
        if isinstance(member, property):
            function = member.fget
        elif isinstance(member, staticmethod):
            function = member.__func__
        if isinstance(function, FunctionType):
            assert function.__module__ == function.__globals__["__name__"], (
                "the code is that of another decorator"
            )
            function._torchdynamo_disable = True  # type: ignore[attr-defined]
            _skip(function.__code__)
    return made


def in_compiled_backward() -> bool:
    """Return whether compiled autograd runs the current backward (`torch._dynamo.config.compiled_autograd`)."""
    module = sys.modules.get("torch._dynamo.compiled_autograd")
    if module is None:
        return False
    # Before torch 2.5, the setting itself ends with the compiled backward.
    return bool(getattr(module, "in_compiled_autograd_region", module.compiled_autograd_enabled))
