"""A site's own launchers: variables named by DUALDIST_RANK_FROM and others."""

from __future__ import annotations

import pytest

from dualdist.core.launch import detect
from dualdist.errors import ConfigurationError
from dualdist.processes.job import without_launchers

from . import test_detect
from .test_detect import numbers

NAMED = numbers("MY_") | {
    f"DUALDIST_{name}_FROM": f"MY_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
}
TORCHRUN = test_detect.TORCHRUN | {"RANK": "1"}


def test_named_variables_describe_the_process() -> None:
    launch = detect(NAMED)
    assert (launch.launcher, launch.rank, launch.size) == ("site", 3, 6)
    assert (launch.local_rank, launch.local_size) == (1, 2)
    assert launch.describe("rank") == "3 (from MY_RANK)"


def test_the_local_numbers_need_not_be_named() -> None:
    launch = detect({name: value for name, value in NAMED.items() if "LOCAL" not in name})
    assert (launch.rank, launch.size, launch.local_rank, launch.local_size) == (3, 6, None, None)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"DUALDIST_SIZE_FROM": ""}, "`DUALDIST_SIZE_FROM` must be set beside DUALDIST_RANK_FROM"),
        ({"DUALDIST_RANK_FROM": ""}, "`DUALDIST_RANK_FROM` must be set beside DUALDIST_SIZE_FROM"),
        ({"MY_RANK": ""}, "`MY_RANK` must be set, because DUALDIST_RANK_FROM names it"),
        ({"MY_LOCAL_SIZE": ""}, "`MY_LOCAL_SIZE` must be set, because DUALDIST_LOCAL_SIZE_FROM names it"),
        ({"MY_SIZE": "six"}, "`MY_SIZE` must be a whole number of at least 0, but is 'six'"),
        ({"MY_RANK": "6"}, "`MY_RANK` must be at least 0 and less than MY_SIZE=6"),
    ],
)
def test_each_mistake_is_an_error_that_names_the_variable(change: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        detect(NAMED | change)


def test_torchrun_inside_the_launcher_of_a_site_wins() -> None:
    assert detect(NAMED | TORCHRUN).launcher == "torchrun"


def test_other_variables_of_this_form_and_empty_ones_name_nothing() -> None:
    assert detect(TORCHRUN | {"MAIL_FROM": "me", "DUALDIST_RANK_FROM": ""}).launcher == "torchrun"


def test_another_launcher_that_disagrees_is_an_error() -> None:
    with pytest.raises(ConfigurationError, match=r"of srun, and 3 .* of site instead"):
        detect(NAMED | {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"})


def test_processes_of_dualdist_run_inherit_none_of_the_variables() -> None:
    assert without_launchers(NAMED | {"KEPT": "yes"}) == {"KEPT": "yes"}
