"""Every behaviour runs in several worlds: `world` has one parameter per backend, transport and number of ranks."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest
import torch

from .helpers.forks import use_forks
from .helpers.time_table import IN_WORLD, TimeTable
from .helpers.world import WORLDS, World
from .selection import MARKS, NEW_INTERPRETERS, Suite, is_core, suite_of, worlds_of

GROUPS = {
    "launchers/test_matrix.py": "Slurm",
    "launchers/test_cluster_examples.py": "Slurm",
    "launchers/test_hang.py": "Slurm",
    "launchers/test_page_blocks.py": "Slurm",
    "launchers/test_slurm_steps.py": "Slurm",
    "launchers/test_start_with.py": "Slurm",
    "launchers/test_sharding.py": "Slurm",
}
"""Files whose tests share what is slow to start. All other tests form groups by world, else by file."""

FIRST = ("launchers/test_hosts.py", "horovod-gloo-2", "torch-gloo-2", "torch-gloo-3", "Slurm")
"""The groups that take longest, so that no process has one left when the others are done."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--worlds", help="run behaviours in these worlds alone, such as torch-gloo-2,horovod-mpi-3")
    parser.addoption(
        "--programs",
        type=int,
        help="random programs in each world of tests/parity/test_programs.py and test_mutations.py: "
        "by default 10, with --rest 25, with --all 50",
    )
    parser.addoption("--program-seed", type=int, help="run this program of tests/parity/test_mutations.py alone")
    parser.addoption(
        "--all",
        action="store_true",
        help="run every test, in more worlds, and start those of users as new interpreters; see tests/selection.py",
    )
    parser.addoption(
        "--rest", action="store_true", help="run what .ci/run adds to the tests of ci/test; see tests/selection.py"
    )
    parser.addoption("--times", action="store_true", help="show what each folder, file and world takes")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.programs is None:
        config.option.programs = 50 if config.option.all else 25 if config.option.rest else 10
    # The same examples in each run; others with --all.
    hypothesis.settings.register_profile("suite", derandomize=not config.option.all)
    hypothesis.settings.load_profile("suite")
    if config.option.times:
        config.pluginmanager.register(TimeTable())
    config.addinivalue_line("markers", "core: the tests that a contributor runs first; see tests/selection.py")
    for name in MARKS:
        config.addinivalue_line("markers", f"{name}(where): left to a later suite; see selection.py")
    config.addinivalue_line("markers", "ranks(*sizes): the numbers of ranks that a behaviour is about")
    config.addinivalue_line("markers", "world_kinds(*names): the kinds of worlds that a behaviour is about")
    # A shell's `ci/test &` ignores SIGINT, and what tests start would ignore it too.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # With it, print() writes a line in pieces, between which another rank may write.
    os.environ.pop("PYTHONUNBUFFERED", None)
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)  # of several threads, those without a core delay small operations by far
    chosen = config.getoption("--worlds")
    if chosen and set(chosen.split(",")) - WORLDS.keys():
        raise pytest.UsageError(f"--worlds must be among {', '.join(WORLDS)}, but is {chosen} instead.")


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[Any]:
    """Keep Python from searching the items for garbage, which would take as long as collecting them."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "world" not in metafunc.fixturenames:
        return
    if worlds := metafunc.config.getoption("--worlds"):
        chosen = [name for name in _fitting_worlds(metafunc.definition) if name in worlds.split(",")]
    else:
        chosen = _worlds_of(metafunc.definition, _suite(metafunc.config))
    metafunc.parametrize("world", chosen, indirect=True, scope="session")


def _suite(config: pytest.Config) -> Suite:
    return Suite.ALL if config.option.all else Suite.CI if config.option.rest else Suite.FIRST


def _fitting_worlds(definition: pytest.Item) -> list[str]:
    """Return the worlds with the numbers of ranks and of the kinds that a behaviour is about."""
    ranks, kinds = (definition.get_closest_marker(name) for name in ("ranks", "world_kinds"))
    return [
        name
        for name, (kind, size) in WORLDS.items()
        if (ranks is None or size in ranks.args) and (kinds is None or kind.name in kinds.args)
    ]


def _worlds_of(definition: pytest.Item, suite: Suite) -> list[str]:
    return worlds_of(_file(definition.nodeid), _fitting_worlds(definition), suite)


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark the core tests, before `-m` selects."""
    world = IN_WORLD.search(item.nodeid)
    if is_core(_file(item.nodeid), world and world[1]):
        item.add_marker(pytest.mark.core)


def _is_in_suite(item: pytest.Item, suite: Suite) -> bool:
    world = IN_WORLD.search(item.nodeid) if "world" in getattr(item, "fixturenames", ()) else None
    return suite_of(item) <= suite and (world is None or world[1] in _worlds_of(item, suite))


def _is_chosen(item: pytest.Item, config: pytest.Config) -> bool:
    """Return whether a test is in the suite to run, or the command line names it or its file."""
    if config.option.keyword or any(".py" in one for one in config.args):
        return True
    if config.option.rest:
        return _is_in_suite(item, Suite.CI) and not _is_in_suite(item, Suite.FIRST)
    return suite_of(item) <= _suite(config)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Run the tests of a group together, so that what they share is started once, and nothing else is up."""
    chosen = {item: _is_chosen(item, config) for item in items}
    config.hook.pytest_deselected(items=[item for item in items if not chosen[item]])
    items[:] = [item for item in items if chosen[item]]
    order = {name: place for place, name in enumerate([*FIRST, *WORLDS])}
    items.sort(key=lambda item: order.get(_group(item.nodeid), len(order)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With pytest-xdist, have each group run in one process, and the groups start in their order."""
    from xdist.scheduler import LoadScopeScheduling

    config.option.loadscopereorder = False
    scheduler = LoadScopeScheduling(config, log)
    scheduler._split_scope = _group
    return scheduler


def _file(nodeid: str) -> str:
    """Return the file of a test, below tests/."""
    return nodeid.partition("::")[0].removeprefix("tests/")


def _group(nodeid: str) -> str:
    """Return the name of the group of a test."""
    world = IN_WORLD.search(nodeid)
    return world[1] if world else GROUPS.get(_file(nodeid), _file(nodeid))


_worlds: list[World] = []
"""The world that is up, if one is."""


@pytest.fixture(scope="session")
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    """The processes of one world; they stay up for all tests of that world."""
    made = World(*WORLDS[request.param])
    _worlds.append(made)
    yield made
    _worlds.remove(made)
    made.close()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """End the world before a test that does not use it: processes of Horovod take CPU time while they wait."""
    use_forks(not item.config.getoption("--all") or _file(item.nodeid) not in NEW_INTERPRETERS)
    if "world" not in getattr(item, "fixturenames", ()):
        for made in _worlds:
            made.close()


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No variable of a launcher, of Horovod or of dualdist reaches a test by accident."""
    for name in os.environ:
        if name.startswith(("DUALDIST_", "HOROVOD_", "OMPI_", "PMI", "SLURM_", "TORCHELASTIC_")):
            monkeypatch.delenv(name)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
