"""`average=`, which Horovod deprecated in favour of `op`: what it does, and where its warning points."""

from __future__ import annotations

import inspect
import re
import sys
import warnings

import pytest
import torch

import dualdist as hvd

from ..helpers.world import everywhere

FUNCTIONS = [
    name
    for name in hvd.__all__
    if inspect.isfunction(getattr(hvd, name)) and "average" in inspect.signature(getattr(hvd, name)).parameters
]


@pytest.mark.parametrize("average", [False, True])
@everywhere
def test_average_chooses_between_average_and_sum(average: bool) -> None:
    with pytest.warns(DeprecationWarning, match="use `op`"):
        result = hvd.allreduce(torch.tensor([hvd.rank() + 1.0]), average=average)
    assert result.item() == sum(range(hvd.size() + 1)) / (hvd.size() if average else 1)


@everywhere
def test_a_name_in_the_place_of_average_means_the_average() -> None:
    with pytest.warns(DeprecationWarning, match="use `op`"):
        result = hvd.allreduce(torch.tensor([hvd.rank() + 1.0]), "loss")  # type: ignore[arg-type]
    assert result.item() == sum(range(hvd.size() + 1)) / hvd.size()


@everywhere
def test_average_excludes_op() -> None:
    with pytest.raises(ValueError, match="average"):
        hvd.allreduce(torch.ones(1), average=True, op=hvd.Sum)


def test_eight_functions_take_average() -> None:
    assert len(FUNCTIONS) == 8


@pytest.mark.parametrize("name", FUNCTIONS)
@everywhere
def test_the_warning_points_at_the_line_of_the_call(name: str) -> None:
    function = getattr(hvd, name)
    value = [torch.ones(2)] if name.startswith("grouped") else torch.ones(2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("ignore")
        # Only what Python attributes to this module, as its default filters do for `__main__`.
        warnings.filterwarnings("always", category=DeprecationWarning, module=re.escape(__name__) + "$")
        line = sys._getframe().f_lineno + 1
        result = function(value, average=False)
    if "async" in name:
        hvd.synchronize(result)
    assert [(warning.filename, warning.lineno) for warning in caught] == [(__file__, line)]
