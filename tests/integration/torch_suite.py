"""Runs torch's own tests of DistributedDataParallel, with dualdist's class in its place, and compares the results.

    python tests/integration/torch_suite.py --ranks 2 3
    python tests/integration/torch_suite.py --ranks 2 --own test_ddp_inference    # torch's own class
    python tests/integration/torch_suite.py --ranks 2 --mpi    # over the MPI process group
    python tests/integration/torch_suite.py --ranks 2 --mpi --own

The tests are those in torch/testing/_internal/distributed/distributed_test.py of the installed torch. They run on gloo,
on the CPU even if they are made for GPUs. With --mpi --own all tests run, not only those of DistributedDataParallel;
see torch_suite_mpi.py. tests/data/torch_suite.json names those that do not pass, and why. Exits with 1 if a result is
another one.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import inspect
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import traceback
import unittest
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.helpers.cpu_in_place_of_gpu import use_cpu
from tests.helpers.world import MPIRUN

EXPECTED = Path(__file__).parents[1] / "data" / "torch_suite.json"
"""For each number of ranks: the tests that do not pass, and what they look at. "all" holds for each, "mpi" for torch's
own class over the MPI process group."""

TIMEOUT_SECONDS = 60
"""How long one test may take. torch's default is 300 s."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tests", nargs="*", help="names of tests; all if none is named")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--own", action="store_true", help="run torch's own class; compare only with --mpi")
    parser.add_argument("--mpi", action="store_true", help="run over the MPI process group")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        run_here(options.tests, options.own)
        return 0
    wrong = False
    for size in options.ranks:
        print_result = functools.partial(print, sep=": ", flush=True)
        results = run(size, options.tests, options.own, options.mpi, report=print_result)
        passed = sum(result == "passed" for result in results.values())
        print(f"{size} ranks: {passed} of {len(results)} passed")
        if options.mpi or not options.own:
            found = differences(size, results, own=options.own)
            wrong |= bool(found)
            print(*found, sep="\n")
    return int(wrong)


def expected(size: int, own: bool = False) -> dict[str, str]:
    """Return the tests that do not pass with `size` ranks, and what they look at. own: torch's class over MPI."""
    listed = json.loads(EXPECTED.read_text())
    return dict(listed["mpi"]) if own else {**listed["all"], **listed.get(str(size), {})}


def differences(size: int, results: dict[str, str], own: bool = False) -> list[str]:
    """Return sentences about the results that are not as expected."""
    listed = expected(size, own)
    return [
        f"{name} should {'fail' if name in listed else 'pass'}, but: {result}"
        for name, result in results.items()
        if result != "skipped" and (result == "passed") == (name in listed)
    ]


def run(
    size: int,
    tests: list[str],
    own: bool = False,
    mpi: bool = False,
    report: Callable[[str, str], None] = lambda *_: None,
) -> dict[str, str]:
    """Return the result of each test on `size` ranks: "passed", "skipped", or the last line of the error.

    report: called with each name and result at once.
    """
    results: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in ("barrier", "test_dir", "init_dir"):
            (Path(folder) / name).mkdir()
        settings = {
            "BACKEND": "gloo",
            "WORLD_SIZE": str(size),
            "TEMP_DIR": folder,
            "MASTER_ADDR": "127.0.0.1",
            "OMP_NUM_THREADS": "1",
            "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": str(TIMEOUT_SECONDS),
        }
        command = [sys.executable, __file__, "--worker", str(size), *(["--own"] if own else []), *tests]
        if mpi:
            start = [part.format(size=size) for part in MPIRUN]
            worker_script = str(Path(__file__).with_name("torch_suite_mpi.py"))
            command = [*start, sys.executable, worker_script, *(["--own"] if own else []), *tests]
        output = Path(folder) / "errors.txt"
        with output.open("w") as errors:
            worker = subprocess.Popen(
                command, env={**os.environ, **settings}, stdout=subprocess.PIPE, stderr=errors, text=True
            )
        with worker:
            assert worker.stdout is not None
            for line in worker.stdout:
                name, _, result = line.rstrip().partition(": ")
                if name.startswith("test_"):  # Gloo writes its own lines
                    report(name, result)
                    results[name] = result
        if worker.returncode:
            raise RuntimeError(f"The tests ended with {worker.returncode}:\n{output.read_text()}")
    return results


def run_here(tests: list[str], own: bool) -> None:
    """Run torch's tests in processes that are forked from this one. Print the results.

    The variables are those that `run` sets.
    """
    case = forked_case(imported_suite(), own)
    for name in tests or names_of_tests(case, only_ddp=True):
        result = unittest.TestResult()
        with contextlib.redirect_stdout(io.StringIO()):
            case(name).run(result)
        print(f"{name}: {outcome(result)}", flush=True)


def imported_suite() -> Any:
    """Return the module of torch's tests, which also run without GPUs then."""
    from torch.testing._internal import common_distributed

    common_distributed.skip_if_lt_x_gpu = lambda *_, **__: lambda test: test
    common_distributed.skip_if_no_gpu = lambda test: test
    common_distributed.TIMEOUT_OVERRIDE.clear()
    from torch.testing._internal.distributed import distributed_test

    return distributed_test


def names_of_tests(case: type[unittest.TestCase], only_ddp: bool) -> list[str]:
    """Return the names of torch's tests in `case`: all, or those that use DistributedDataParallel."""
    tests = {name: getattr(case, name) for name in dir(case) if name.startswith("test_")}
    return [name for name, test in tests.items() if callable(test) and (not only_ddp or is_about_ddp(name, test))]


def is_about_ddp(name: str, test: Any) -> bool:
    """Return whether a test of torch uses DistributedDataParallel."""
    source = name + inspect.getsource(inspect.unwrap(test))
    return re.search("ddp|DistributedDataParallel", source, re.IGNORECASE) is not None


def forked_case(distributed_test: Any, own: bool) -> type[unittest.TestCase]:
    """Return torch's tests as a class whose ranks are forked. own: without dualdist."""
    import torch
    from torch.testing._internal.common_utils import instantiate_parametrized_tests

    class Forked(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):  # type: ignore[misc]
        def setUp(self) -> None:
            super().setUp()
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

        def run_test(self, test_name: str, parent_pipe: Any) -> None:
            use_cpu()
            try:
                if not own:
                    import dualdist as hvd

                    hvd.init(init_method="file:///unused", rank=self.rank, world_size=int(os.environ["WORLD_SIZE"]))
                substitute(distributed_test, own)
            except Exception:
                parent_pipe.send(traceback.format_exc())
                sys.exit(self.TEST_ERROR_EXIT_CODE)
            super().run_test(test_name, parent_pipe)

    instantiate_parametrized_tests(Forked)
    return Forked


def substitute(distributed_test: Any, own: bool) -> None:
    """Put another class in the place of torch's: dualdist's, or torch's own, but on the CPU in any case."""
    import torch

    base: Any = torch.nn.parallel.DistributedDataParallel
    if not own:
        import dualdist as hvd

        base = hvd.DistributedDataParallel
    made = type(base.__name__, (base,), {"__init__": on_cpu(base), "__module__": __name__})
    globals()[base.__name__] = made  # pickle looks it up
    for place in (torch.nn.parallel, distributed_test):
        setattr(place, base.__name__, made)


def on_cpu(base: Any) -> Any:
    """Return the constructor of `base` without the devices."""

    def __init__(self: Any, module: Any, device_ids: Any = None, output_device: Any = None, **options: Any) -> None:
        base.__init__(self, module, **options)

    return __init__


def outcome(result: unittest.TestResult) -> str:
    """Return "passed", "skipped", or the last line of the error."""
    if result.skipped:
        return "skipped"
    problems = [*result.errors, *result.failures]
    if not problems:
        return "passed"
    lines = [line for line in problems[0][1].splitlines() if re.match(r"\w+(\.\w+)*(Error|Exception|Failed)\b", line)]
    return (lines or ["failed"])[-1][:200]


if __name__ == "__main__":
    sys.exit(main())
