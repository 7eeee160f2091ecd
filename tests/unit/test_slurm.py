"""Where the processes of a Slurm step look for rank 0."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import pytest

from dualdist.core.meeting import Board, Meeting
from dualdist.errors import ConfigurationError
from dualdist.slurm import slurm_board

STEP = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "1", "SLURM_STEP_NODELIST": "localhost,node[2-3]"}


def board(rank: int, env: Mapping[str, str]) -> Board:
    found = slurm_board(rank, env)
    assert found is not None
    return found


def test_ranks_meet_on_the_first_host_and_skip_the_server_of_another_job() -> None:
    stranger, ours = (STEP | {"DUALDIST_SECRET": secret} for secret in ("00", "11"))

    def run(rank: int) -> list[str]:
        env = ours | {"SLURM_NODEID": str(rank)}
        with Meeting(board(rank, env), rank, 2, 60.0) as meeting:
            return meeting.gather(str(rank))

    with Meeting(board(0, stranger), 0, 2, 60.0), ThreadPoolExecutor(2) as pool:
        assert list(pool.map(run, range(2))) == [["0", "1"]] * 2


def test_the_error_when_rank_0_does_not_answer_names_the_remedy() -> None:
    meeting = Meeting(board(1, STEP | {"SLURM_NODEID": "1"}), 1, 2, 0.1)
    with pytest.raises(ConfigurationError, match="MASTER_ADDR"):
        meeting.gather("here")
