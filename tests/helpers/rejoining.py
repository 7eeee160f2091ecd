"""Leaving the world in a test and joining it again."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import dualdist as hvd

from .world import World


@contextmanager
def outside_world() -> Iterator[None]:
    """Leave the world for the body of the `with`; join it again afterwards if the body has not."""
    hvd.shutdown()
    try:
        yield
    finally:
        hvd.init()


def rejoin() -> None:
    """Leave the world, and join it again."""
    hvd.shutdown()
    hvd.init()


@contextmanager
def rejoined(world: World, variables: Mapping[str, str]) -> Iterator[None]:
    """Let all ranks join again with these environment variables, and after the body of the `with` without them."""
    former, *_ = world.run(_rejoin, variables)
    yield
    world.run(_rejoin, former)


def _rejoin(variables: Mapping[str, str | None]) -> dict[str, str | None]:
    """Return the former values of the variables. None: it is not set."""
    former = {name: os.environ.pop(name, None) for name in variables}
    os.environ.update({name: value for name, value in variables.items() if value is not None})
    rejoin()
    return former
