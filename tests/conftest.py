"""Every behaviour runs on every backend: the fixture `world` has one parameter per world (backend, transport, size)."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from .helpers import fork_server
from .helpers.world import WORLDS, World


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--worlds", help="run behaviours on these worlds alone, such as torch-gloo-2,horovod-mpi-3"
    )
    parser.addoption("--all", action="store_true", help="start every process as a new interpreter")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "ranks(*sizes): the numbers of ranks that a behaviour is about")
    config.addinivalue_line("markers", "world_kinds(*names): the kinds of worlds that a behaviour is about")
    fork_server.use(not config.getoption("--all"))
    chosen = config.getoption("--worlds")
    if chosen and set(chosen.split(",")) - WORLDS.keys():
        raise pytest.UsageError(f"--worlds must be among {', '.join(WORLDS)}, but is {chosen} instead.")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "world" not in metafunc.fixturenames:
        return
    chosen = (metafunc.config.getoption("--worlds") or ",".join(WORLDS)).split(",")
    ranks, kinds = (metafunc.definition.get_closest_marker(name) for name in ("ranks", "world_kinds"))
    names = [
        name
        for name, (kind, size) in WORLDS.items()
        if name in chosen
        and (ranks is None or size in ranks.args)
        and (kinds is None or kind.name in kinds.args)
    ]
    metafunc.parametrize("world", names, indirect=True, scope="session")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the tests of one world together, so that one world is up at a time."""
    order = {name: place for place, name in enumerate(WORLDS)}

    def place(item: pytest.Item) -> int:
        callspec = getattr(item, "callspec", None)
        return -1 if callspec is None else order.get(callspec.params.get("world"), -1)

    items.sort(key=place)


@pytest.fixture(scope="session")
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    """The processes of one world; they stay up for all tests of that world."""
    made = World(*WORLDS[request.param])
    yield made
    made.close()


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No variable of a launcher, of Horovod or of dualdist reaches a test by accident."""
    for name in os.environ:
        if name.startswith(("DUALDIST_", "HOROVOD_", "OMPI_", "PMI", "SLURM_", "TORCHELASTIC_")):
            monkeypatch.delenv(name)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
