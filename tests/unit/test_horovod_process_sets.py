"""Which process sets are refused, because Horovod's own Gloo controller confuses their ranks on several hosts."""

from __future__ import annotations

from types import ModuleType
from unittest import mock

import pytest

import dualdist as hvd

from ..helpers.requirements import need_modules

TWO_HOSTS = ("alpha", "alpha", "beta", "beta")


@pytest.fixture
def group() -> ModuleType:
    need_modules("horovod")
    from dualdist.horovod import group

    return group


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
    version: str, mpi: bool, refused: bool, group: ModuleType
) -> None:
    with (
        mock.patch("importlib.metadata.version", return_value=version),
        mock.patch("dualdist.horovod.group.hvd.mpi_enabled", return_value=mpi),
    ):
        if not refused:
            group.check_process_set((1, 2, 3), TWO_HOSTS)
            return
        with pytest.raises(hvd.BackendUnavailableError, match=r"ranks \[1, 2, 3\].*dualdist install-horovod"):
            group.check_process_set((1, 2, 3), TWO_HOSTS)


def test_sets_of_one_host_are_never_refused(group: ModuleType) -> None:
    with mock.patch("importlib.metadata.version", return_value="0.28.1"):
        group.check_process_set((0, 1), TWO_HOSTS)
        group.check_process_set((1, 3), ("alpha",) * 4)
