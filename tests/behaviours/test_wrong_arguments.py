"""Every public function with every parameter wrong in turn: an error that names the parameter, on every rank."""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import dualdist as hvd

from ..helpers.odd_values import ODD, accepted, odd_values
from ..helpers.public_functions import CASES, COLLECTIVES, Case
from ..helpers.ranks import check_next_calls_work
from ..helpers.world import everywhere

OURS = tuple(
    error
    for error in (getattr(hvd, name) for name in hvd.__all__)
    if isinstance(error, type) and issubclass(error, Exception)
)
REFUSALS: tuple[type[Exception], ...] = (ValueError, TypeError, *OURS)


def parameters(function: Callable[..., Any]) -> list[str]:
    """Return the names of the parameters of `function` that take one value each."""
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    found = inspect.signature(function).parameters.items()
    return [name for name, parameter in found if name != "self" and parameter.kind not in several]


def problem(case: Case, parameter: str, value: Any) -> str | None:
    """Return what is wrong with how `case` answers the wrong `value`; None if it is refused as it should be."""
    try:
        result = case.run(**{parameter: value})
    except REFUSALS as error:
        text = str(error)
        is_named = re.search(rf"`{parameter}\b", text) and " must " in text
        return None if is_named else f"raised {type(error).__name__}: {text}"
    except Exception as error:
        return f"raised {type(error).__name__}: {error}"
    return f"returned {result!r}"


def problems(name: str) -> Iterator[str]:
    case = CASES[name]
    for parameter in parameters(case.function):
        legitimate = accepted(name, parameter)
        for odd, make in odd_values(name, parameter).items():
            if odd not in legitimate.names:
                found = problem(case, parameter, make())
                if found is not None:
                    yield f"{name}({parameter}={odd}) {found}"
            elif legitimate.called:
                case.run(**{parameter: make()})


@pytest.mark.parametrize("name", CASES)
@everywhere
def test_a_wrong_value_is_an_error_that_names_the_parameter(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # `average`
        warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
        found = "\n".join(problems(name))
    assert not found, found
    check_next_calls_work()


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("name", COLLECTIVES)
@everywhere
def test_a_value_that_is_wrong_on_one_rank_is_an_error_on_all(name: str) -> None:
    case = COLLECTIVES[name]
    for parameter in parameters(case.function):
        if "object" in accepted(name, parameter).names:
            continue
        if hvd.rank() == 0:
            found = problem(case, parameter, ODD["object"]())
            assert found is None, f"{name}({parameter}=) {found}"
        else:
            with pytest.raises(hvd.HorovodInternalError, match=rf"rank 0 failed .*`{parameter}\b.* must "):
                case.run()
        check_next_calls_work()


@everywhere
def test_tensors_of_one_collective_on_two_devices_are_refused() -> None:
    """One is a double of torch, since few machines have two kinds of devices."""
    with FakeTensorMode():
        elsewhere = torch.empty(2, device="cuda")
    for function in (hvd.grouped_allreduce, hvd.grouped_allgather, hvd.grouped_reducescatter):
        with pytest.raises(ValueError, match=r"`tensors` must be on one device, but are on \['cpu', 'cuda:0'\]"):
            function([torch.ones(2), elsewhere])
    check_next_calls_work()
