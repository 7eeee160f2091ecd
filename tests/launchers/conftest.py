"""What the tests of launchers share. Each cluster is started when the first test asks for it."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dualdist.cli import main
from dualdist.processes.hosts import AGENT_COMMAND

from ..helpers.forks import forked
from ..helpers.namespace_hosts import Network, running_network
from ..helpers.process_watch import Watched
from ..helpers.run_command import Ended, Families, Run
from ..helpers.script_launch import Script
from ..helpers.slurm_cluster import Slurm, running_slurm
from ..helpers.ssh_hosts import start_hosts


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


@pytest.fixture
def script(tmp_path: Path) -> Script:
    """Write a text into a file, and return its path."""

    def written(text: str) -> str:
        path = tmp_path / "script.py"
        path.write_text(text)
        return str(path)

    return written


@pytest.fixture
def python(monkeypatch: pytest.MonkeyPatch) -> str:
    """The Python of the processes that this one starts: a fork, unless the file is in NEW_INTERPRETERS with --all."""
    (chosen,) = forked([sys.executable])
    assert AGENT_COMMAND[0] == sys.executable  # which stays as it is: agents do not import torch
    monkeypatch.setattr(sys, "executable", chosen)
    return chosen


@pytest.fixture
def run(request: pytest.FixtureRequest, capfdbinary: pytest.CaptureFixture[bytes]) -> Run:
    """`dualdist run` in this process: importing torch again would take most of the time."""

    def started(*arguments: str) -> Ended:
        code = main(["run", *arguments])
        output, errors = capfdbinary.readouterr()
        ended = Ended(code, output, errors.decode(errors="surrogateescape"))
        text = f"{(output + errors).decode(errors='replace')}\nexit code {code}"
        line = shlex.join(arguments).encode(errors="backslashreplace").decode()  # an argument may be no text
        request.node.add_report_section("call", f"of dualdist {line}", text[-20_000:])
        return ended

    return started


@pytest.fixture(scope="session")
def ssh_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return start_hosts(tmp_path_factory.mktemp("ssh"))


@pytest.fixture
def hosts(ssh_folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make hostA and hostB reachable."""
    monkeypatch.setenv("DUALDIST_SSH", ssh_folder)


@pytest.fixture
def families(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Families:
    """Return a watch on the FAMILY processes that have started, and on the processes that they have started."""
    folder = tmp_path / "families"
    folder.mkdir()
    monkeypatch.setenv("FAMILIES", str(folder))

    def watched() -> Watched:
        files = list(folder.iterdir())
        assert files
        found = [pid for file in files for pid in (file.name, file.read_text())]
        # A process may have ended before it wrote the other id.
        return Watched(int(pid) for pid in found if pid)

    return watched
