"""A rank that dies at a random moment is named by all others, as the only cause. More: see tests/helpers/deaths.py."""

from __future__ import annotations

import pytest

from ..helpers.deaths import KINDS, deaths
from ..helpers.requirements import need_modules


@pytest.mark.only_all
@pytest.mark.parametrize("kind", KINDS)
def test_all_others_name_the_rank_that_died_and_end(kind: str) -> None:
    need_modules(*(["horovod"] if "horovod" in kind else []), *(["mpi4py"] if "mpi" in kind else []))
    for death in deaths(5, seed=0, kinds=[kind]):
        assert death.is_right, death
