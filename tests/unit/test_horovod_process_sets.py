"""Which process sets Horovod's own Gloo controller connects on several hosts.

The expected values were observed with Horovod 0.28.1, started by its horovodrun on two hosts with two ranks each.
"""

from __future__ import annotations

from unittest import mock

import pytest

import dualdist as hvd

from ..helpers.requirements import need_modules

need_modules("horovod")

from dualdist.backends.horovod import group  # noqa: E402 - it imports Horovod

TWO_HOSTS = ("alpha", "alpha", "beta", "beta")


@pytest.mark.parametrize("ranks", [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3), (0, 1, 2), (0, 2, 3)])
def test_sets_that_horovod_connects(ranks: tuple[int, ...]) -> None:
    assert group.can_connect(ranks, TWO_HOSTS)


@pytest.mark.parametrize("ranks", [(0, 1, 3), (1, 2, 3)])
def test_sets_for_which_horovod_waits_without_an_end(ranks: tuple[int, ...]) -> None:
    assert not group.can_connect(ranks, TWO_HOSTS)


def test_every_set_of_one_host_connects() -> None:
    assert group.can_connect((1, 3), ("alpha",) * 4)


def test_a_name_that_two_connections_have_is_no_name() -> None:
    """Ranks 0 and 3 name their connection 0. Rank 7, which has no peer, also uses the name 0."""
    assert not group.can_connect((0, 3, 7), ("a", "a", "a", "b", "b", "b", "c", "c", "c"))


@pytest.mark.parametrize(
    ("version", "mpi", "refused"),
    [
        ("0.28.1", False, True),
        ("0.28.1+torch2.13.0.openmpi4.1.4.cpu.iface", False, True),
        ("0.28.1+torch2.13.0.openmpi4.1.4.cpu.patch1", False, True),
        ("0.28.1", True, False),
        ("0.28.1+torch2.13.0.openmpi4.1.4.cpu.patch2", False, False),
        ("0.28.1+torch2.15.0.cu132.nompi.cpu.patch12", False, False),
    ],
)
def test_only_a_gloo_controller_that_was_not_repaired_is_refused(
    version: str, mpi: bool, refused: bool
) -> None:
    with (
        mock.patch("importlib.metadata.version", return_value=version),
        mock.patch("dualdist.backends.horovod.group.hvd.mpi_enabled", return_value=mpi),
    ):
        if not refused:
            group.check_process_set((1, 2, 3), TWO_HOSTS)
            return
        with pytest.raises(hvd.BackendUnavailableError, match=r"ranks \[1, 2, 3\].*ci/install-horovod"):
            group.check_process_set((1, 2, 3), TWO_HOSTS)
