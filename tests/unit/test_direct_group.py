"""Groups that their members connect alone; here the members are threads of one process."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch.distributed import HashStore

from dualdist.core.backends.torch_groups import direct_group


@pytest.mark.parametrize("size", [2, 8, 9, 16])
def test_each_member_of_a_small_or_large_group_gets_all_messages_in_rank_order(size: int) -> None:
    store = HashStore()
    rounds = 3

    def run(rank: int) -> list[list[bytes]]:
        group = direct_group("gloo", store, "test", range(size), rank, timedelta(seconds=60))
        try:
            return [group.allgather_bytes(b"%d.%03d" % (number, rank)) for number in range(rounds)]
        finally:
            group.close()

    with ThreadPoolExecutor(size) as pool:
        received = list(pool.map(run, range(size)))
    expected = [[b"%d.%03d" % (number, rank) for rank in range(size)] for number in range(rounds)]
    assert received == [expected] * size
