"""Code that torch.compile must not compile: communication, which reads frames and uses locks and threads."""

from __future__ import annotations

import functools
from types import FunctionType
from typing import Any, TypeVar, cast

import torch

T = TypeVar("T")

_frames: Any = torch._C._dynamo.eval_frame


CAN_SPLIT_GRAPHS = hasattr(_frames, "set_code_exec_strategy")
"""From torch 2.7 on. Older releases split graphs at buckets, too, but some of them refuse checkpointed layers."""


def not_compiled(made: T) -> T:
    """Decorate a function, or a class for its methods: it stays uncompiled, with all that it calls.

    `torch.compiler.disable` does the same, but imports Dynamo, which takes longer than importing torch, and wraps each
    function in another one. These are the two settings that it makes: one for what compiled code calls, one for what
    C++ calls while a compiled function runs, such as the hooks of autograd. Before torch 2.7, a function is wrapped.

    It must stand directly above `def`: it marks the code, which all functions share that another decorator has wrapped.
    """
    if isinstance(made, FunctionType):
        return cast(T, _left_out(made))
    for name, member in list(vars(made).items()) if isinstance(made, type) else ():
        if isinstance(member, FunctionType):
            setattr(made, name, _left_out(member))
        elif isinstance(member, property):
            setattr(made, name, member.getter(_left_out(member.fget)))
        elif isinstance(member, staticmethod):
            setattr(made, name, staticmethod(_left_out(member.__func__)))
    return made


def _left_out(function: Any) -> Any:
    assert function.__module__ == function.__globals__["__name__"], "the code is that of another decorator"
    function._torchdynamo_disable = True
    if CAN_SPLIT_GRAPHS:
        skip = _frames._FrameAction.SKIP
        _frames.set_code_exec_strategy(function.__code__, _frames._FrameExecStrategy(skip, skip))
        return function

    def uncompiled(*args: Any, **kwargs: Any) -> Any:
        before = _frames.set_eval_frame(None)
        try:
            return function(*args, **kwargs)
        finally:
            _frames.set_eval_frame(before)

    _frames.skip_code(uncompiled.__code__)
    return functools.update_wrapper(uncompiled, function)
