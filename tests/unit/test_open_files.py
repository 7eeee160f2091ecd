"""The limit of open files is raised for large worlds, and left alone otherwise."""

from __future__ import annotations

import resource
from datetime import timedelta

import pytest
import torch.distributed as dist

from dualdist.core.backends.torch_groups import allow_open_files
from dualdist.devices.groups import DeviceGroups
from dualdist.errors import ConfigurationError


class Limits:
    """In place of the limits of this process."""

    RLIMIT_NOFILE, RLIM_INFINITY = resource.RLIMIT_NOFILE, resource.RLIM_INFINITY

    def __init__(self, soft: int, hard: int) -> None:
        self.now = (soft, hard)

    def getrlimit(self, _: int) -> tuple[int, int]:
        return self.now

    def setrlimit(self, _: int, limits: tuple[int, int]) -> None:
        self.now = limits


def limits_after(monkeypatch: pytest.MonkeyPatch, size: int, soft: int, hard: int) -> tuple[int, int]:
    limits = Limits(soft, hard)
    monkeypatch.setattr("dualdist.core.meeting.server.resource", limits)
    allow_open_files(size)
    return limits.now


def test_a_limit_that_is_too_low_is_raised_to_what_the_world_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    for enough in ((4096, 1 << 20), (resource.RLIM_INFINITY, resource.RLIM_INFINITY)):
        assert limits_after(monkeypatch, 64, *enough) == enough
    for hard in (1 << 20, resource.RLIM_INFINITY):
        soft, kept = limits_after(monkeypatch, 1000, 1024, hard)
        assert 4 * 1000 < soft < 5 * 1000
        assert kept == hard
    assert limits_after(monkeypatch, 1000, 1024, 4200) == (4200, 4200)


def test_the_limit_is_raised_for_each_later_group_of_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = Limits(1024, 1 << 20)
    monkeypatch.setattr("dualdist.core.meeting.server.resource", limits)
    monkeypatch.setattr(DeviceGroups, "_make_group", lambda self, ranks: None)
    config = {"cpu": "gloo", "cuda": "nccl"}
    groups = DeviceGroups(0, config, None, ["a"] * 1000, dist.HashStore(), timedelta(minutes=1), {})
    groups.make(range(1000), 2, lambda text: [text])
    assert 2 * 1000 < limits.now[0] < 3 * 1000


def test_a_hard_limit_that_is_too_low_is_an_error_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match=r"for 1000 ranks, but is 2048 instead\. Raise it"):
        limits_after(monkeypatch, 1000, 1024, 2048)
