"""dualdist has every public name of horovod.torch, with the same parameters, when Horovod is not installed.

    python -m tests.unit.test_surface horovod.torch >tests/data/horovod_torch_surface.json

records the names from the installed Horovod.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import pickle
import sys
from collections.abc import Iterable, Iterator
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest

import dualdist
from dualdist import errors

from .test_without_torch import run_python

RECORDED = Path(__file__).parents[1] / "data" / "horovod_torch_surface.json"
SURFACE: dict[str, Any] = json.loads(RECORDED.read_text())


def described(module: Any, names: Iterable[str]) -> Iterator[tuple[str, Any]]:
    """Yield each of the dotted `names` with its description in `module`, None for one that is absent.

    A number is itself; an exception is its built-in bases; anything that can be called is its parameters, each as
    [name, kind, default] with an empty default where there is none; all else is its type.
    """
    written_by_name = ("global_process_set", "Compression.none")
    spelled = {id(attrgetter(name)(module)): name for name in written_by_name}
    for name in names:
        try:
            value = attrgetter(name)(module)
        except AttributeError:
            yield name, None
            continue
        if isinstance(value, int):
            yield name, value
        elif inspect.isclass(value) and issubclass(value, Exception):
            yield name, [base.__name__ for base in value.__mro__ if base.__module__ == "builtins"]
        elif callable(value):
            parameters = inspect.signature(value).parameters.values()
            yield name, [[p.name, p.kind.name, default_of(p, spelled)] for p in parameters]
        else:
            yield name, type(value).__name__


def default_of(parameter: inspect.Parameter, spelled: dict[int, str]) -> str:
    if parameter.default is inspect.Parameter.empty:
        return ""
    return spelled.get(id(parameter.default), repr(parameter.default))


def horovod_names(owner: Any, prefix: str = "") -> Iterator[str]:
    """Yield the public names in `owner`, and those of Horovod's own classes after their class."""
    for name in dir(owner):
        value = getattr(owner, name)
        ours = not inspect.isclass(owner) or (getattr(value, "__module__", None) or "").startswith("horovod")
        if name.startswith("_") or name == "check_extension" or not ours:
            continue
        if not inspect.ismodule(value) or name == "elastic":
            yield prefix + name
        if inspect.isclass(value) and not issubclass(value, Exception):
            yield from horovod_names(value, f"{prefix}{name}.")


def print_surface(module_name: str) -> None:
    module: Any = importlib.import_module(module_name)
    names = list(SURFACE)
    if module_name == "horovod.torch":
        module.init, module.shutdown = module.mpi_ops._basics.init, module.mpi_ops._basics.shutdown
        names = [*horovod_names(module), "elastic.run"]
        for name in ("TorchState", "ElasticSampler"):
            names += [f"elastic.{name}", *horovod_names(getattr(module.elastic, name), f"elastic.{name}.")]
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(found)}" for name, found in described(module, names))
    print(f"{{\n{lines}\n}}")


IMPORTS = """
import sys
sys.modules["horovod"] = None  # importing it fails now, as when it is not installed
import dualdist, dualdist.core.launch, dualdist.core.meeting
print(*[name for name in ("torch", "numpy", "dualdist.elastic", "http.server") if name in sys.modules])
dualdist.Sum, dualdist.StallError, dir(dualdist)
print("torch" in sys.modules)
dualdist.elastic.run, dualdist.checkpoint.save, dualdist.run, dualdist.spawn
print("torch" in sys.modules)
from tests.unit.test_surface import print_surface
print_surface("dualdist")
"""


@pytest.fixture(scope="module")
def output() -> str:
    """What a new interpreter prints in IMPORTS."""
    finished = run_python(IMPORTS)
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


@pytest.fixture(scope="module")
def ours(output: str) -> dict[str, Any]:
    """The surface of dualdist, imported where Horovod cannot be imported."""
    return dict(json.loads(output.split("\n", 3)[3]))


def test_the_package_launch_and_meeting_import_without_torch(output: str) -> None:
    assert output.startswith("\nFalse\nTrue\n{")


def test_the_stub_has_the_public_names_from_the_same_modules() -> None:
    stub = ast.parse(Path(dualdist.__file__).with_suffix(".pyi").read_text())
    stated = {
        alias.name: f"dualdist.{node.module or alias.name}"
        for node in stub.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert sorted(stated) == list(dualdist.__all__)
    for name, module in stated.items():
        value = getattr(dualdist, name)
        assert value is getattr(importlib.import_module(module), name, sys.modules[module])


def test_no_file_of_the_package_has_the_name_of_a_public_function() -> None:
    """Importing such a module would put it in the place of the function."""
    files = {path.stem for path in Path(dualdist.__file__).parent.iterdir()}
    modules = {name for name in dualdist.__all__ if inspect.ismodule(getattr(dualdist, name))}
    assert files & set(dualdist.__all__) == modules


def test_names_are_listed_exported_and_pickled_as_those_of_any_module() -> None:
    exported: dict[str, Any] = {}
    exec("from dualdist import *", exported)
    assert set(dualdist.__all__) == set(exported) - {"__builtins__"}
    assert set(dualdist.__all__) <= set(dir(dualdist))
    assert pickle.loads(pickle.dumps(dualdist.allreduce)) is dualdist.allreduce
    with pytest.raises(AttributeError, match="module 'dualdist' has no attribute 'nothing'"):
        _ = dualdist.nothing  # type: ignore[attr-defined]


@pytest.mark.parametrize(("name", "here"), dualdist._NAMES_IN_TORCH.items())  # type: ignore[attr-defined]
def test_a_name_of_torch_distributed_is_an_error_with_the_name_here(name: str, here: str) -> None:
    with pytest.raises(AttributeError, match=f"has no attribute '{name}'. Its name here is '{here}'"):
        getattr(dualdist, name)
    assert here in dualdist.__all__


def test_python_suggests_a_name_that_differs_little() -> None:
    ended = run_python("import dualdist; dualdist.all_reduce")
    assert ended.stderr.endswith("has no attribute 'all_reduce'. Did you mean: 'allreduce'?\n")


def test_all_67_names_of_horovod_torch_are_recorded() -> None:
    assert sum("." not in name for name in SURFACE) == 67


@pytest.mark.parametrize("name", SURFACE)
def test_name_is_there_and_takes_what_horovod_takes(name: str, ours: dict[str, Any]) -> None:
    expected, found = SURFACE[name], ours[name]
    assert found is not None, f"dualdist has no {name}"
    if isinstance(expected, list) and all(isinstance(part, list) for part in expected):
        more = found[len(expected) :]
        assert found[: len(expected)] == expected
        assert all(default for _, _, default in more), f"{more} must have defaults: Horovod has none of them"
    else:
        assert found == expected


PARENTS = {
    errors.ConfigurationError: (ValueError,),
    errors.BackendUnavailableError: (errors.ConfigurationError,),
    errors.WorldMismatchError: (errors.ConfigurationError,),
    errors.CheckpointError: (RuntimeError,),
    errors.DamagedCheckpointError: (errors.CheckpointError,),
    errors.HorovodInternalError: (RuntimeError,),
    errors.NotInitializedError: (errors.HorovodInternalError, ValueError),
    errors.CollectiveMismatchError: (errors.HorovodInternalError,),
    errors.StallError: (errors.HorovodInternalError,),
    errors.HostsUpdatedInterrupt: (RuntimeError,),
    errors.ProcessEndedError: (RuntimeError,),
    errors.ReplicaMismatchError: (RuntimeError,),
}
"""The errors, and the built-in ones that a script of Horovod may catch instead."""


def test_the_tree_is_the_one_in_the_docstring_and_public() -> None:
    assert {error.__name__ for error in PARENTS} == set(errors.__all__)
    for error, parents in PARENTS.items():
        assert error.__bases__ == parents
        assert errors.__doc__ is not None and error.__name__ in errors.__doc__
        assert getattr(dualdist, error.__name__) is error


if __name__ == "__main__":
    print_surface(sys.argv[1])
