"""dualdist.compat's command line, and its copies of horovodrun's variables, which launch detection ignores."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dualdist.compat import __main__ as command_line
from dualdist.compat import export_launch
from dualdist.compat.common import HorovodBasics, _cache, is_version_greater_equal_than, num_rank_is_power_2, split_list
from dualdist.compat.data import AsyncDataLoaderMixin, BaseDataLoader
from dualdist.copies import add_copies, names_of_copies
from dualdist.core.launch import detect
from dualdist.core.types import World
from dualdist.horovod import horovod_variables

from .test_detect import numbers

ALONE = (("RANK", "0"), ("SIZE", "1"))
MPIRUN = numbers("OMPI_COMM_WORLD_")


def test_the_launcher_is_still_detected_beside_the_copies() -> None:
    for env in ({}, MPIRUN):
        exported = dict(env)
        export_launch(exported)
        add_copies(horovod_variables(World(1, 4, 1, 2, 0, 2)), exported)  # of another world than the launcher's
        export_launch(exported)
        assert exported["HOROVOD_SIZE"] == ("6" if env else "1") and exported["HOROVOD_HOSTNAME"]
        assert detect(exported) == detect(env)


def test_what_the_compiled_library_of_horovod_has_is_absent() -> None:
    with pytest.raises(AttributeError, match="has no 'MPI_LIB_CTYPES'"):
        HorovodBasics("horovod").MPI_LIB_CTYPES  # noqa: B018


def test_a_horovodrun_inside_is_detected() -> None:
    env: dict[str, str] = {}
    export_launch(env)
    address = {"HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1", "HOROVOD_GLOO_RENDEZVOUS_PORT": "7001"}
    found = detect({**env, "HOROVOD_RANK": "1", "HOROVOD_SIZE": "2", **address})
    assert (found.launcher, found.rank, found.size) == ("horovodrun", 1, 2)


def test_programs_find_all_variables_that_horovodrun_sets_for_its_gloo_controller() -> None:
    env: dict[str, str] = {"HOROVOD_HOSTNAME": "given"}
    export_launch(env)
    found = {name: value for name, value in env.items() if name.startswith("HOROVOD_")}
    alone = {f"HOROVOD_{kind}{name}": value for kind in ("", "LOCAL_", "CROSS_") for name, value in ALONE}
    more = {"HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo", "HOROVOD_HOSTNAME": "given"}
    assert found == alone | more
    assert "HOROVOD_CONTROLLER" in names_of_copies(env) and "HOROVOD_HOSTNAME" not in names_of_copies(env)


def test_only_known_numbers_are_exported_before_init() -> None:
    env = dict(MPIRUN)
    export_launch(env)
    assert env["HOROVOD_LOCAL_RANK"] == "1"
    assert "HOROVOD_CROSS_RANK" not in env
    add_copies(horovod_variables(World(3, 6, 1, 2, 1, 3)), env)
    assert (env["HOROVOD_CROSS_RANK"], env["HOROVOD_CROSS_SIZE"]) == ("1", "3")


def test_contradictory_variables_are_left_to_init() -> None:
    env = {"OMPI_COMM_WORLD_SIZE": "2"}
    export_launch(env)
    assert env == {"OMPI_COMM_WORLD_SIZE": "2"}


def test_power_of_two_and_split_list_are_those_of_horovod_common() -> None:
    assert [num for num in range(9) if num_rank_is_power_2(num)] == [1, 2, 4, 8]
    assert split_list([1, 2, 3, 4, 5], 3) == [[1, 2], [3, 4], [5]]


@pytest.mark.parametrize("arguments", [["no/such/script.py"], ["-m", "no.such.module"], ["-m"], ["-x"], []])
def test_a_target_that_cannot_be_run_ends_with_code_2_and_a_reason(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command_line, "install", lambda: None)
    assert command_line.main(arguments) == 2
    assert "dualdist.compat" in capsys.readouterr().err


class Loader(AsyncDataLoaderMixin, BaseDataLoader):
    """Yields numbers, or raises."""

    def __init__(self, size: int, fails: bool = False) -> None:
        super().__init__(size)
        self.fails = fails

    def __len__(self) -> int:
        return 100

    def _iterate(self) -> Iterator[int]:
        yield from range(100)
        if self.fails:
            raise KeyError("the reason")


@pytest.mark.parametrize("size", [0, 1, 64])
def test_an_async_loader_yields_the_batches_of_each_epoch(size: int) -> None:
    loader = Loader(size)
    assert list(loader) == list(loader) == list(range(100))
    loader.close_async_loader()


def test_an_error_of_an_async_loader_is_not_raised_after_it_is_closed() -> None:
    class FailsLate(Loader):
        def _iterate(self) -> Iterator[int]:
            yield 0
            self.finished_event.wait()
            raise KeyError("the reason")

    loader = FailsLate(1)
    batches = iter(loader)
    assert next(batches) == 0
    loader.close_async_loader()
    assert list(batches) == list(loader) == []


@pytest.mark.parametrize("taken", [0, 1, 50])
def test_an_async_loader_with_a_full_queue_can_be_closed(taken: int) -> None:
    loader = Loader(1)
    batches = iter(loader)
    for _ in range(taken):
        next(batches)
    loader.close_async_loader()
    assert taken == 0 or not loader.thread.is_alive()


def test_an_async_loader_raises_the_exception_of_its_thread_in_every_iteration() -> None:
    loader = Loader(2, fails=True)
    for _ in range(2):
        with pytest.raises(KeyError, match="the reason"):
            list(loader)


def test_versions_are_compared_by_their_numbers_and_others_refused_as_in_horovod() -> None:
    pairs = "2.1.0 2.0.9,2.0 2.0.0,1.10.0 1.9.0,2.15.0+cu132 2.15.0,2.0.0.post1 2.0.0,2.0.0rc1 2.0.0,1.9.1 1.10.0"
    found = [is_version_greater_equal_than(*pair.split()) for pair in pairs.split(",")]
    assert found == [True] * 5 + [False] * 2
    for ver, target in ((1, "1.0.0"), ("1.0.0", "1.0")):
        with pytest.raises(ValueError, match="must be"):
            is_version_greater_equal_than(ver, target)  # type: ignore[arg-type]


def test_results_are_kept_by_their_arguments() -> None:
    calls = []
    cached = _cache(lambda *args, **kwargs: calls.append((args, kwargs)))
    for _ in range(2):
        cached(1, a=2)
    cached(2)
    assert calls == [((1,), {"a": 2}), ((2,), {})]
