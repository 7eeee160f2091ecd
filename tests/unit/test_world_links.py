"""How `dualdist doctor --world` measures links. Two threads take the place of the hosts."""

from __future__ import annotations

import itertools
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from dualdist.doctor import world_links
from dualdist.doctor.world_links import Link, measure_links

LATE = 60.0


def measured() -> list[Link]:
    """Return the links between two hosts."""
    texts, barrier = ["", ""], threading.Barrier(2)

    def links_of(place: int) -> list[Link]:
        def gather(text: str) -> list[str]:
            texts[place] = text
            barrier.wait()
            found = list(texts)
            barrier.wait()
            return found

        return measure_links(place, 2, f"127.0.0.{1 + place}", gather)

    with ThreadPoolExecutor(2) as pool:
        ours, theirs = pool.map(links_of, range(2))
    assert ours == theirs
    return ours


def test_a_program_that_delays_all_first_answers_makes_no_link_late(monkeypatch: pytest.MonkeyPatch) -> None:
    answer, asked = world_links._answer, itertools.count()

    def late(connection: socket.socket, length: int) -> tuple[float, float]:
        seconds, clock = answer(connection, length)
        is_late = length == 0 and next(asked) < 2 * world_links._QUESTIONS
        return (seconds + LATE, clock + LATE) if is_late else (seconds, clock)

    monkeypatch.setattr(world_links, "_answer", late)
    links = measured()
    assert [(link.source, link.target, link.problem) for link in links] == [(0, 1, ""), (1, 0, "")]
    for link in links:
        assert link.round_trip is not None and link.clock is not None and link.bandwidth
        assert 0 < link.round_trip < LATE and abs(link.clock) < LATE
    broken = Link(0, 1, problem="no connection")
    assert world_links._ask(broken, ("127.0.0.1", 1)) is broken  # in later rounds it would only wait again
