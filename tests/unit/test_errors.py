"""The tree of errors, and the built-in errors that a Horovod script may catch instead."""

from __future__ import annotations

import pytest

import dualdist
from dualdist import errors

PARENTS = {
    errors.ConfigurationError: (ValueError,),
    errors.BackendUnavailableError: (errors.ConfigurationError,),
    errors.WorldMismatchError: (errors.ConfigurationError,),
    errors.CheckpointError: (RuntimeError,),
    errors.DamagedCheckpointError: (errors.CheckpointError,),
    errors.HorovodInternalError: (RuntimeError,),
    errors.NotInitializedError: (errors.HorovodInternalError, ValueError),
    errors.CollectiveMismatchError: (errors.HorovodInternalError,),
    errors.StallError: (errors.HorovodInternalError,),
    errors.HostsUpdatedInterrupt: (RuntimeError,),
    errors.ProcessEndedError: (RuntimeError,),
    errors.ReplicaMismatchError: (RuntimeError,),
}


def test_the_tree_is_the_one_in_the_docstring() -> None:
    assert {error.__name__ for error in PARENTS} == set(errors.__all__)
    for error, parents in PARENTS.items():
        assert error.__bases__ == parents
        assert errors.__doc__ is not None and error.__name__ in errors.__doc__


def test_every_error_is_public() -> None:
    for error in PARENTS:
        assert getattr(dualdist, error.__name__) is error


@pytest.mark.parametrize("name", ["local_rank", "local_size", "cross_rank", "cross_size"])
def test_calls_before_init_say_what_to_call(name: str) -> None:
    with pytest.raises(errors.NotInitializedError, match=r"dualdist\.init\(\)"):
        getattr(dualdist, name)()
