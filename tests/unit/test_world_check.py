"""What `dualdist doctor --world` concludes from what the processes report. The facts are made up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from dualdist.doctor.world_check import (
    Problem,
    ProcessFacts,
    WorldFacts,
    as_json,
    as_text,
    find_problems,
    find_warnings,
)
from dualdist.doctor.world_links import Link

GOOD = ProcessFacts(
    rank=0,
    node="h0-1",
    host="h0",
    local_rank=0,
    address="10.0.0.1",
    interface="eth0",
    versions="a",
    backend="torch",
    usable=True,
    devices=("0", "1"),
    models=("H100", "H100"),
    installed_gpus=2,
    device_nodes=(0, 1),
    cores=range(8),
    core_nodes=(0, 1),
    installed_cores=8,
)


def world(links: Sequence[Link] = (), num_hosts: int = 3, **changes: dict[int, Any]) -> WorldFacts:
    """Return the facts of two processes on each host. changes: name of a fact -> {rank: other value}."""
    processes = []
    for rank in range(2 * num_hosts):
        place, local_rank = divmod(rank, 2)
        here = replace(GOOD, rank=rank, local_rank=local_rank, node=f"h{place}-1", host=f"h{place}")
        processes.append(replace(here, **{name: values[rank] for name, values in changes.items() if rank in values}))
    known = {"a": {"torch": "2.15", "numpy": "2.4"}, "b": {"torch": "2.11", "pip": "1"}}
    return WorldFacts(processes, known, links or ring(num_hosts))


def ring(num_hosts: int, **slow: Any) -> list[Link]:
    """Return the links that are measured between sound hosts; the first has the values `slow`."""
    steps = [1 << power for power in range((num_hosts - 1).bit_length())]
    pairs = [(source, (source + step) % num_hosts) for source in range(num_hosts) for step in steps]
    good = [Link(source, target, 1e-4, 0.0, 1e9) for source, target in pairs]
    return [replace(good[0], **slow), *good[1:]] if good else []


def problems(facts: WorldFacts) -> list[Problem]:
    return find_problems(facts, 10e6)


def test_a_sound_world_has_none() -> None:
    for num_hosts in (1, 2, 3, 5, 8):
        assert problems(world(num_hosts=num_hosts)) == []


@pytest.mark.parametrize(
    ("changes", "kind", "rank", "words"),
    [
        ({"usable": {3: False}, "backend": {3: "no x"}}, "backend", 3, "on h1 (rank 3): no x"),
        ({"backend": {4: "horovod"}}, "backend", 4, "h2 (rank 4) chooses horovod and the others torch"),
        ({"models": dict.fromkeys((4, 5), ("A100",) * 2)}, "gpu", 4, "h2 has 2 x A100 and the others 2 x"),
    ],
)
def test_a_fact_that_is_wrong_is_named_with_its_host(changes: dict[str, Any], kind: str, rank: int, words: str) -> None:
    (found,) = problems(world(**changes))
    assert (found.kind, found.hosts, found.ranks) == (kind, (f"h{rank // 2}",), (rank,))
    assert words in found.text
    text = as_text(as_json("srun", world(**changes), [found]))
    assert text.endswith(f"WRONG: {found.text}\n1 problem must be solved first.")


def test_gpus_that_torch_does_not_see_are_named() -> None:
    nothing = {rank: () for rank in (2, 3)}
    blind, fewer = problems(world(devices=nothing, models=nothing))
    assert (blind.ranks, fewer.hosts) == ((2, 3), ("h1",))
    assert "torch sees no GPU on h1 (ranks 2, 3), although the driver lists 2" in blind.text


def test_every_package_that_differs_is_named() -> None:
    found = problems(world(versions={4: "b", 5: "b"}))
    assert [problem.text.partition(",")[0] for problem in found] == [
        f"{name} must be the same version everywhere" for name in ("numpy", "pip", "torch")
    ]
    assert "is absent on h2 (ranks 4, 5) and 2.4 on the others" in found[0].text
    assert "is 1 on h2 (ranks 4, 5) and absent on the others" in found[1].text


def test_of_two_hosts_the_first_is_the_reference() -> None:
    (found, *_) = problems(world(num_hosts=2, versions={2: "b", 3: "b"}))
    assert found.hosts == ("h1",)
    (found,) = problems(world([Link(0, 1, 1e-4, -7.0, 1e9), Link(1, 0, 1e-4, 7.0, 1e9)], 2))
    assert found.text.startswith("The clock of h1 is 7.0 s behind that of h0.")


@pytest.mark.parametrize("wrong", range(5))
def test_the_one_wrong_clock_of_five_is_named(wrong: int) -> None:
    clocks = [3.0 * (host == wrong) for host in range(5)]
    links = [replace(link, clock=clocks[link.target] - clocks[link.source]) for link in ring(5)]
    assert world(links, 5).clocks == clocks
    (found,) = problems(world(links, 5))
    assert found.text.startswith(f"The clock of h{wrong} is 3.0 s ahead of the others'.")


@pytest.mark.parametrize(
    ("slow", "words"),
    [
        ({"bandwidth": 2e8}, "The link from h0 to h1 (eth0 to eth0) is slow: 200.0 MB/s, where 1000.0 MB/s"),
        ({"bandwidth": None}, "is slow: 0.0 MB/s"),
        ({"round_trip": 2e-3}, "a round trip takes 2.0 ms, but should take less than 1.0 ms"),
        (
            {"problem": "10.0.0.2:7: timed out", "round_trip": None, "clock": None, "bandwidth": None},
            "There is no connection from h0 to h1 at 10.0.0.2:7: timed out.",
        ),
    ],
)
def test_the_one_link_that_is_slow_or_closed_is_named(slow: dict[str, Any], words: str) -> None:
    links = ring(3, **slow)
    (found,) = problems(world(links))
    assert found.hosts == ("h0", "h1") and words in found.text
    assert as_json("srun", world(links), [found])["links"][0]["source"] == "h0"


def test_a_link_that_is_slower_than_required_is_named_even_if_all_are() -> None:
    links = [replace(link, bandwidth=5e6) for link in ring(2)]
    assert [problem.kind for problem in problems(world(links, 2))] == ["link", "link"]


def test_a_gpu_on_another_numa_node_than_the_cores_is_named() -> None:
    facts = world(core_nodes={3: (0,), 4: (0,)}, device_nodes={1: (0, -1)})
    (found,) = find_warnings(facts)
    assert (found.kind, found.hosts, found.ranks) == ("numa", ("h1",), (3,))
    report = as_json("srun", facts, problems(facts))
    assert report["can_train"]
    assert f"WARNING: {found.text}\nThis allocation can train." in as_text(report)


def test_a_host_whose_processes_see_one_gpu_each_is_named() -> None:
    facts = world(devices={2: ("x",), 3: ("y",)}, device_numbers={2: ("0",), 3: ("0",)})
    (found,) = find_warnings(facts)
    assert (found.kind, found.hosts, found.ranks) == ("nvlink", ("h1",), (2, 3))


@pytest.mark.parametrize(
    ("cores", "ranks"),
    [
        ({2: (5,), 3: (5,)}, (2, 3)),
        ({2: (5,), 3: (4,)}, ()),
        ({2: (4, 5), 3: (4, 5)}, ()),
        ({2: (4, 5)}, ()),
        ({0: (1,), 1: (1,), 2: (5,), 3: (5,), 4: (5,)}, (0, 1, 2, 3)),
    ],
)
def test_processes_that_are_bound_to_fewer_cores_than_they_are_are_named(
    cores: dict[int, tuple[int, ...]], ranks: tuple[int, ...]
) -> None:
    found = find_warnings(world(cores=cores))
    assert [problem.ranks for problem in found] == [ranks] * bool(ranks)


def test_more_processes_than_a_host_has_cores_are_not_a_matter_of_binding() -> None:
    one = {rank: (0,) for rank in range(6)}
    assert find_warnings(world(cores=one, installed_cores={rank: 1 for rank in range(6)})) == []


def test_ranks_with_the_same_place_on_their_hosts_are_in_one_row() -> None:
    few, many = ((as_text(as_json("srun", world(num_hosts=number), []))) for number in (2, 20))
    assert "  ranks  cores  NUMA node  GPU  its NUMA node\n  0,2    0-7    0-1        0    0\n" in few
    assert "\n  1,3    0-7    0-1        1    1\n" in few
    assert "\n  1,3,5,7,9,11,13,15,... (20)  0-7 " in many
