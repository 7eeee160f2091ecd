"""The clusters that the tests of launchers share; each is started when the first test asks for it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .network import Network, running_network
from .slurm import Slurm, running_slurm


@pytest.fixture(scope="session")
def slurm() -> Iterator[Slurm]:
    """Slurm with two nodes; see slurm.py."""
    with running_slurm() as cluster:
        yield cluster


@pytest.fixture(scope="session")
def network() -> Iterator[Network]:
    """Two hosts; see network.py."""
    with running_network() as hosts:
        yield hosts
