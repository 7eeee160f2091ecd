"""The worlds of the tests of devices. Prints a table of these tests, and writes it as JSON."""

from __future__ import annotations

import ctypes
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import MappingProxyType

import pytest
import torch

from ..helpers.world import World, WorldKind, started
from .device import IS_GPU, TRANSPORT, VARIABLES

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "{size}", "--no-python")


def _world(transport: str, size: int) -> Iterator[World]:
    settings = MappingProxyType(
        {"DUALDIST_BACKEND": "torch", "DUALDIST_TRANSPORT": transport, "NCCL_MULTI_RANK_GPU_ENABLE": "1", **VARIABLES}
    )
    with started(WorldKind(f"torch-{transport}", TORCHRUN, settings), size) as world:
        yield world


@pytest.fixture(scope="session")
def one() -> Iterator[World]:
    """One rank over the transport of the device."""
    yield from _world(TRANSPORT, 1)


@pytest.fixture(scope="session")
def gloo_pair() -> Iterator[World]:
    """Two ranks that share the device over gloo."""
    yield from _world("gloo", 2)


def _nccl_version() -> int:
    """Return the NCCL_VERSION_CODE of the library that this process uses. torch tells that of its headers."""
    number = ctypes.c_int()
    ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(number))
    return number.value


@pytest.fixture(scope="session")
def native_pair() -> Iterator[World]:
    """Two ranks that share the device over its transport."""
    if IS_GPU and (found := _nccl_version()) < 23000:
        pytest.skip(f"NCCL lets ranks share a GPU from 2.30 on, but is {found}; put a newer one into LD_PRELOAD")
    yield from _world(TRANSPORT, 2)


@pytest.fixture(params=["gloo_pair", "native_pair"])
def pair(request: pytest.FixtureRequest) -> World:
    """Each of these two in turn."""
    world: World = request.getfixturevalue(request.param)
    return world


@pytest.fixture(params=["one", "gloo_pair", "native_pair"])
def either(request: pytest.FixtureRequest) -> World:
    """Each of these three in turn."""
    world: World = request.getfixturevalue(request.param)
    return world


@pytest.fixture
def fresh() -> Iterator[World]:
    """One rank over the transport of the device, in a process that has done nothing yet."""
    yield from _world(TRANSPORT, 1)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print test, result and figure. DUALDIST_GPU_REPORT: the file for the JSON."""
    path = os.environ.get("DUALDIST_GPU_REPORT")
    if not path:
        return
    rows = []
    for result in ("passed", "failed", "error", "skipped"):
        for report in terminalreporter.stats.get(result, []):
            if "tests/gpu/" in report.nodeid.replace(os.sep, "/"):
                figure = dict(report.user_properties).get("figure", f"{report.duration:.1f} s")
                rows.append({"test": report.nodeid.partition("::")[2], "result": result, "figure": figure})
    for row in rows:
        terminalreporter.write_line(f"{row['result']:8} {row['figure']!s:>12}  {row['test']}")
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    Path(path).write_text(json.dumps({"torch": torch.__version__, "device": device, "tests": rows}, indent=2))
    if device is None:
        terminalreporter.write_line(f"ci/gpu needs a device: torch {torch.__version__} sees no GPU here.")
    terminalreporter.write_line(f"Written to {path}.")
