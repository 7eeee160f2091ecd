"""Every public function that takes arguments is in the table that the tests of wrong arguments use."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import dualdist as hvd
from dualdist import checkpoint, elastic, lr, metrics, samplers, seeding

from ..helpers.public_functions import CASES

ELSEWHERE = {
    "check_replicas": "test_replicas.py",
    "init": "test_wrong_init.py",
    "elastic.StateHandler": "any object; its subclasses check it",
    "SynchronizedOptimizer": "DistributedOptimizer makes it",
    "checkpoint.Manifest": "read_manifest makes it",
    "checkpoint.RandomState.load_derived": "CheckpointManager calls it with what it has read",
    "metrics.Metric": "abstract",
    "CommHookState": "any object; a checkpoint calls its methods with what it has read",
    "DistributedDataParallel.register_comm_hook": "test_comm_hooks.py",
    "DistributedDataParallel.state_dict": "the arguments of torch's Module",
}
"""Public functions that are not in the table, with the reason. The name of a class also covers its methods."""


def takes_arguments(function: Any) -> bool:
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(function).parameters.items()
    return any(name != "self" and parameter.kind not in several for name, parameter in parameters)


def public_functions(prefix: str, module: ModuleType) -> Iterator[tuple[str, Any]]:
    """Yield the functions and classes of `module`, and the methods that a class defines or inherits in the package."""
    for name in module.__all__:
        thing = getattr(module, name)
        if inspect.isclass(thing):
            if issubclass(thing, BaseException):
                continue
            for method, function in inspect.getmembers(thing, callable):
                if not method.startswith("_") and getattr(function, "__module__", "").startswith("dualdist"):
                    yield f"{prefix}{name}.{method}", getattr(function, "__func__", function)
        if callable(thing):
            yield f"{prefix}{name}", thing


def test_the_table_has_every_public_function_that_takes_arguments() -> None:
    covered = {getattr(case.function, "__func__", case.function) for case in CASES.values()}
    modules = [hvd, checkpoint, elastic, lr, metrics, samplers, seeding]
    missing = {
        name
        for module in modules
        for name, function in public_functions(
            "" if module is hvd else f"{module.__name__.removeprefix('dualdist.')}.", module
        )
        if takes_arguments(function)
        and function not in covered
        and name not in ELSEWHERE
        and name.rpartition(".")[0] not in ELSEWHERE
    }
    assert not missing
