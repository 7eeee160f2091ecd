"""Launches of several tests at the same time: most of them wait for a time limit."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import pytest

T = TypeVar("T")


def chosen(request: pytest.FixtureRequest, parameter: str) -> list[Any]:
    """Return the values that `parameter` has in the chosen tests of a file."""
    items = [item for item in request.session.items if item.path == request.path]
    all_params = [item.callspec.params for item in items if hasattr(item, "callspec")]
    return list(dict.fromkeys(params[parameter] for params in all_params if parameter in params))


@contextlib.contextmanager
def started_at_once(
    request: pytest.FixtureRequest, parameter: str, work: Callable[[Any, Path], T], number: int
) -> Iterator[Mapping[Any, Future[T]]]:
    """The results of `work` for the values that `parameter` has in the chosen tests, `number` at a time.

    It gets an empty folder, too.
    """
    folders: pytest.TempPathFactory = request.getfixturevalue("tmp_path_factory")
    with ThreadPoolExecutor(number) as pool:
        values = chosen(request, parameter)
        yield {value: pool.submit(work, value, folders.mktemp("at_once")) for value in values}
