"""The clusters that the tests of launchers share; each is started when the first test asks for it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ..helpers.namespace_hosts import Network, running_network
from ..helpers.slurm_cluster import Slurm, running_slurm


@pytest.fixture(scope="session")
def slurm() -> Iterator[Slurm]:
    """Slurm with two nodes; see helpers/slurm_cluster.py."""
    with running_slurm() as cluster:
        yield cluster


@pytest.fixture(scope="session")
def network() -> Iterator[Network]:
    """Two hosts; see helpers/namespace_hosts.py."""
    with running_network() as hosts:
        yield hosts
