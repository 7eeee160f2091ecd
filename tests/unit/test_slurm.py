"""Where the processes of a Slurm step look for rank 0."""

from __future__ import annotations

import threading

import pytest

from dualdist.errors import ConfigurationError
from dualdist.meeting.slurm import connect, first_host

STEP = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "1", "SLURM_STEP_NODELIST": "localhost,node[2-3]"}


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node1", "node1"),
        ("node1,node2", "node1"),
        ("node[07-12,20],gpu1", "node07"),
        ("rack[2-3]node[05,7]", "rack2node05"),
        ("a-b.example.org,c", "a-b.example.org"),
        ("gpu-[3,5-9]-ib", "gpu-3-ib"),
    ],
)
def test_the_first_host_of_a_list(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


def test_ranks_meet_on_the_first_host_and_skip_the_server_of_another_job() -> None:
    stranger, ours = (STEP | {"DUALDIST_SECRET": secret} for secret in ("00", "11"))
    heard = []

    def second() -> None:
        with connect(1, ours | {"SLURM_NODEID": "1"}, 10.0) as store:
            heard.append(store.get("word", 10.0))

    with connect(0, stranger, 10.0) as first_port, connect(0, ours, 10.0) as second_port:
        thread = threading.Thread(target=second)
        thread.start()
        first_port.set("word", b"no")
        second_port.set("word", b"yes")
        thread.join()
    assert heard == [b"yes"]


def test_the_error_when_rank_0_does_not_answer_names_the_remedy() -> None:
    with (
        pytest.raises(ConfigurationError, match="MASTER_ADDR"),
        connect(1, STEP | {"SLURM_NODEID": "1"}, 0.1),
    ):
        pass
