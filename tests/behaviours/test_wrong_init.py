"""Wrong arguments of `init`: an error that names them, before any process waits for another."""

from __future__ import annotations

from typing import Any

import pytest

import dualdist as hvd

from ..helpers.ranks import check_next_calls_work
from ..helpers.rejoining import outside_world
from ..helpers.world import everywhere

WRONG: dict[str, list[Any]] = {
    "comm": ["banana", 5, 1.5, {"x": 1}, ["0"], [0.5], [-1], [99], [0, 0], []],
    "process_sets": [5, "banana", b"dynamic", {"x": 1}, [5], ["banana"], [["0"]], [[99]], [[]]],
    "backend": [5, "banana", b"torch", True],
    "transport": [5, "banana", b"gloo", True],
    "init_method": [5, "banana"],
    "rank": ["0", -1, 1.5, True],
    "world_size": ["1", 0, -1, 1.5, True],
}


@pytest.mark.parametrize("name", WRONG)
@everywhere
def test_a_wrong_argument_is_named_and_the_next_init_works(name: str) -> None:
    with outside_world():
        for value in WRONG[name]:
            with pytest.raises((ValueError, TypeError), match=rf"`{name.rstrip('s')}[`s\[].* must ") as caught:
                hvd.init(**{name: value})
            assert not hvd.is_initialized(), value
            assert "\n" not in str(caught.value)
    check_next_calls_work()
