"""Hooks that run after all other hooks of a parameter."""

from __future__ import annotations

from collections.abc import Callable

import torch

from dualdist.gradients.last_hook import register_last_hook


def test_the_last_hooks_run_after_the_others_whenever_those_are_registered() -> None:
    param, called = torch.nn.Parameter(torch.zeros(2)), list[str]()

    def noting(name: str) -> Callable[[torch.Tensor], None]:
        return lambda _: called.append(name)

    def backward() -> list[str]:
        called.clear()
        param.sum().backward()
        return list(called)

    before = param.register_post_accumulate_grad_hook(noting("before"))
    last = register_last_hook(param, noting("last"))
    between = param.register_post_accumulate_grad_hook(noting("between"))
    later = register_last_hook(param, noting("later"))
    after = param.register_post_accumulate_grad_hook(noting("after"))
    assert backward() == ["before", "between", "after", "last", "later"]
    before.remove()
    last.remove()
    assert backward() == ["between", "after", "later"]
    between.remove()
    again = param.register_post_accumulate_grad_hook(noting("again"))
    assert backward() == ["after", "again", "later"]
    for handle in (after, again, later):
        handle.remove()
    assert backward() == []
