"""The six numbers of each rank, computed from where each rank runs."""

from __future__ import annotations

import pytest

from dualdist.core.launch import Place, nodes, topology

# places -> (local_rank, local_size, cross_rank, cross_size) of each rank, counted by hand
CASES: dict[str, tuple[list[Place], list[tuple[int, int, int, int]]]] = {
    "one process": ([("a", 0)], [(0, 1, 0, 1)]),
    "one node": ([("a", 0), ("a", 1)], [(0, 2, 0, 1), (1, 2, 0, 1)]),
    "two even nodes": (
        [("a", 0), ("a", 1), ("b", 0), ("b", 1)],
        [(0, 2, 0, 2), (1, 2, 0, 2), (0, 2, 1, 2), (1, 2, 1, 2)],
    ),
    "uneven nodes": (
        [("a", 0), ("b", 0), ("b", 1), ("b", 2), ("c", 0), ("c", 1)],
        [(0, 1, 0, 3), (0, 3, 1, 3), (1, 3, 0, 2), (2, 3, 0, 1), (0, 2, 2, 3), (1, 2, 1, 2)],
    ),
    "ranks dealt round the nodes": (
        [("a", 0), ("b", 0), ("a", 1), ("b", 1)],
        [(0, 2, 0, 2), (0, 2, 1, 2), (1, 2, 0, 2), (1, 2, 1, 2)],
    ),
    "local ranks unknown": ([("a", None), ("a", None), ("b", None)], [(0, 2, 0, 2), (1, 2, 0, 1), (0, 1, 1, 2)]),
    "two agents on one host": ([("a", 0), ("a", 1), ("a", 0)], [(0, 2, 0, 2), (1, 2, 0, 1), (0, 1, 1, 2)]),
    "local ranks not in the order of ranks": ([("a", 1), ("a", 0)], [(1, 2, 0, 1), (0, 2, 0, 1)]),
}


@pytest.mark.parametrize("case", CASES)
def test_the_six_numbers_equal_those_counted_by_hand(case: str) -> None:
    places, expected = CASES[case]
    worlds = topology(places)
    assert [(w.rank, w.size) for w in worlds] == [(rank, len(places)) for rank in range(len(places))]
    assert [(w.local_rank, w.local_size, w.cross_rank, w.cross_size) for w in worlds] == expected


def test_each_agent_on_a_host_counts_as_a_node() -> None:
    assert nodes([("a", 0), ("a", 1), ("a", 0), ("a", 0), ("b", 0)]) == ["a", "a", "a.1", "a.2", "b"]
    assert nodes([("a", None), ("a", None)]) == ["a", "a"]
