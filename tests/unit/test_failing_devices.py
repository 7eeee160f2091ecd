"""Failures while collectives run on a device: they are aborted, after the other ranks can notice the failure.

Doubles that record stand in the place of process groups and connections.
"""

from __future__ import annotations

import sys
import threading
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch

from dualdist.core import accelerator
from dualdist.core.agreement.call import Call
from dualdist.core.agreement.guard import Guard, Observer
from dualdist.core.collectives.allreduce import ALLREDUCE
from dualdist.core.collectives.join import _device_of
from dualdist.core.types import Sum
from dualdist.devices import groups as device_groups
from dualdist.devices.choice import error_handling
from dualdist.devices.groups import DeviceGroup, transport_timeout
from dualdist.errors import HorovodInternalError, StallError

CUDA = torch.device("cuda", 1)
CALL = Call(ALLREDUCE, name="loss", site=("train.py", 7))
MINUTE = timedelta(seconds=60)


@pytest.fixture(autouse=True)
def bound(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """The devices that threads have made the current ones. There is no GPU here."""
    devices: list[torch.device] = []
    monkeypatch.setattr(accelerator, "bind", devices.append)
    return devices


@pytest.fixture
def destroyed(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The process groups that were destroyed."""
    groups: list[object] = []
    monkeypatch.setattr(device_groups, "abort_process_group", groups.append)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    return groups


def device_group(*types: str) -> tuple[DeviceGroup, Any]:
    """Return a group of two ranks that carries tensors on the device, or of these types, and its process group."""
    inner = mock.Mock()
    return DeviceGroup([0, 1], 0, inner, frozenset(types or {"cuda"}), CUDA), inner


def guard(events: list[str]) -> Guard:
    connections = mock.Mock(**{"lost_peers.return_value": [1]})
    connections.close.side_effect = lambda: events.append("connections closed")
    return Guard(connections, lambda: events.append("groups aborted"))


@pytest.mark.parametrize("error", [HorovodInternalError("a rank has left"), StallError("late"), KeyboardInterrupt()])
def test_groups_are_aborted_after_the_other_ranks_can_notice(error: BaseException) -> None:
    events: list[str] = []
    guarded = guard(events)
    with pytest.raises(type(error)):
        guarded.run(Observer(), CALL, mock.Mock(side_effect=error))
    assert events == ["connections closed", "groups aborted"]
    with pytest.raises(HorovodInternalError, match=r"cannot run: .*shutdown\(\) and init\(\)"):
        guarded.run(Observer(), CALL, mock.Mock())


@pytest.mark.usefixtures("destroyed")
def test_only_the_device_part_of_a_process_group_is_aborted_and_only_once(bound: list[torch.device]) -> None:
    group, process_group = device_group("cpu", "cuda")
    group.abort()
    group.abort()
    group.close()
    assert process_group.mock_calls == [mock.call._get_backend(CUDA), mock.call._get_backend().abort()]
    assert bound == [CUDA]


def test_a_group_is_aborted_where_the_interpreter_ends_and_starts_no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_groups, "in_thread", mock.Mock(side_effect=RuntimeError("at shutdown")))
    group, process_group = device_group("cpu", "cuda")
    group.abort()
    assert process_group._get_backend().abort.called and group.is_aborted


def test_an_abort_does_not_keep_another_group_from_its_own(destroyed: list[object]) -> None:
    """NCCL's abort of one communicator may wait for a kernel of another one."""
    is_free, waited = threading.Event(), []
    (first, inner), (second, other) = device_group(), device_group()
    inner._get_backend().abort.side_effect = lambda: waited.append(is_free.wait(10))
    other._get_backend().abort.side_effect = is_free.set
    for end in (first.abort, second.abort, first.close, second.close):
        end()
    assert waited == [True]
    assert destroyed == [inner, other]


def test_a_group_whose_abort_does_not_end_is_left_alone(
    destroyed: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    left: list[object] = []
    monkeypatch.setattr(device_groups, "_ABORT_SECONDS", 0.0)
    monkeypatch.setattr(device_groups, "never_delete", left.append)
    monkeypatch.setattr(device_groups, "skip_destructors_at_exit", lambda: left.append("no destructors"))
    never = threading.Event()
    group, process_group = device_group()
    process_group._get_backend().abort.side_effect = never.wait
    group.abort()
    group.close()
    assert left == [process_group, "no destructors"] and not destroyed
    never.set()


@pytest.mark.usefixtures("destroyed")
def test_no_collective_and_no_other_abort_reaches_a_group_during_its_abort(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.15's class for NCCL would use a communicator that is being freed."""
    (group, process_group), other, ends = device_group(), mock.Mock(), threading.Event()
    process_group._get_backend().abort.side_effect = lambda: ends.wait(20)
    other.abort.side_effect = ends.set
    for one in (process_group, other):
        monkeypatch.setitem(torch.distributed.distributed_c10d._world.pg_map, one, ("nccl", mock.Mock()))
    group.abort()
    with pytest.raises(HorovodInternalError, match="given up its collectives"):
        group.allreduce_(mock.Mock(device=CUDA), Sum)
    device_groups.abort_process_groups()
    assert ends.is_set() and not process_group.allreduce.called and not process_group.abort.called


def test_a_process_group_of_the_cpu_notices_failures_itself() -> None:
    process_group: Any = mock.Mock()
    DeviceGroup([0, 1], 0, process_group, frozenset({"cpu"}), None).abort()
    assert process_group.mock_calls == []


def test_a_device_that_has_failed_or_is_busy_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    never = threading.Event()
    monkeypatch.setattr(accelerator, "synchronize", lambda device: never.wait())
    assert not accelerator.ends_within(CUDA, 0.1)
    never.set()
    assert accelerator.ends_within(CUDA, 20)
    monkeypatch.setattr(accelerator, "synchronize", mock.Mock(side_effect=RuntimeError("device-side assert")))
    assert not accelerator.ends_within(CUDA, 20)


def test_a_stall_is_reported_before_the_watchdog_of_nccl_acts() -> None:
    assert transport_timeout(MINUTE, CUDA) >= MINUTE + timedelta(seconds=10)
    assert transport_timeout(MINUTE, None) == MINUTE


def test_the_watchdog_of_nccl_does_not_end_the_process_unless_the_user_says_so() -> None:
    assert error_handling(CUDA, {}) == {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "2"}
    assert error_handling(CUDA, {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "3"}) == {}
    assert error_handling(CUDA, {"TORCH_NCCL_ASYNC_ERROR_HANDLING": ""}) == error_handling(CUDA, {})
    assert error_handling(None, {}) == {}


def test_tensors_on_another_device_than_that_of_the_group_are_copied_there() -> None:
    group, _ = device_group("cpu", "cuda")
    used = [str(group.wire_device(torch.device(name))) for name in ("cuda:1", "cuda:0", "cpu", "xpu:0")]
    assert used == ["cuda:1", "cuda:1", "cpu", "cpu"]


@pytest.mark.parametrize(("passed", "expected"), [(None, 1), (0, 0), (3, 3)])
def test_a_joined_rank_contributes_from_its_own_device(
    passed: int | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        sys.modules[_device_of.__module__], "current", lambda: mock.Mock(device=CUDA, join_device_index=passed)
    )
    assert _device_of("cuda") == torch.device("cuda", expected)
    assert _device_of("cpu") == torch.device("cpu")
