"""Keeps torch.compile from tracing classes: Dynamo expects process groups and works to be written in C++.

`torch.compiler.disable` does this, but imports Dynamo, which takes longer than importing torch. These are the two
settings that it makes: one for functions that compiled code calls, one for functions that C++ calls.
"""

from __future__ import annotations

from types import FunctionType
from typing import TypeVar

import torch

__all__ = ("untraced",)

C = TypeVar("C", bound=type)


def untraced(made: C) -> C:
    """Let Dynamo call the methods of a class without tracing them. A decorator."""
    frames = torch._C._dynamo.eval_frame
    skip = frames._FrameAction.SKIP
    for member in vars(made).values():
        function = member.fget if isinstance(member, property) else member
        if isinstance(function, FunctionType):
            function._torchdynamo_disable = True  # type: ignore[attr-defined]
            frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))
    return made
