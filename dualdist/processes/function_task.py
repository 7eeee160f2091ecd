"""A function and its arguments in the form in which spawn_child.py receives them, and the command that runs it."""

from __future__ import annotations

import importlib.util
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import spawn as multiprocessing_spawn
from typing import Any, cast

from ..errors import ConfigurationError
from . import spawn_child

__all__ = ("child_command", "pickled_task")

_INSTALL = "install cloudpickle (pip install cloudpickle) and use dualdist.run"


def pickled_task(
    name: str, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], *, by_value: bool
) -> bytes:
    """Return what spawn_child.py needs to prepare its process and to call `function(*args, **kwargs)`.

    name: that of the parameter `function`, for errors. by_value: send functions of the main module, and functions that
    have no name of their own, with cloudpickle if it is installed. Then the processes do not import the main module.
    Raises ConfigurationError for what cannot be pickled.
    """
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    # Whether the main module was typed into a prompt or a notebook, or read from the standard input.
    typed = file is None or not os.path.exists(file)
    by_value = by_value and importlib.util.find_spec("cloudpickle") is not None
    if typed and not by_value and getattr(function, "__module__", None) == "__main__":
        raise ConfigurationError(
            f"`{name}` must be a function that a new process can import, but {function!r} comes from a prompt, a "
            f"notebook or the standard input instead. Write it in a module, or {_INSTALL}."
        )
    try:
        work = _dumps(by_value)((function, tuple(args), dict(kwargs)))
    except Exception as error:
        raise ConfigurationError(
            f"`{name}` and its arguments must be objects that can be pickled, but pickling failed: {error}. Use a "
            f"function at the top of a module and arguments that can be copied{'' if by_value else f', or {_INSTALL}'}."
        ) from error
    preparation = multiprocessing_spawn.get_preparation_data("dualdist")
    if typed or by_value:
        for field in ("init_main_from_path", "init_main_from_name"):
            preparation.pop(field, None)
    # The original type, AuthenticationString, refuses to be pickled.
    preparation["authkey"] = bytes(preparation["authkey"])
    return pickle.dumps((preparation, work))


def _dumps(by_value: bool) -> Callable[[Any], bytes]:
    if not by_value:
        return pickle.dumps
    import cloudpickle

    return cast("Callable[[Any], bytes]", cloudpickle.dumps)


def child_command(executable: str | None = None) -> list[str]:
    """Return the command of a process. The agent adds two arguments: the open files of the task and of the result."""
    # The interpreter's own flags, as multiprocessing passes them on.
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    path = os.path.abspath(spawn_child.__file__)
    code = (
        "import sys\nwith open(sys.argv[1], 'rb') as f: s = f.read()\nexec(compile(s, sys.argv[1], 'exec'))"
    )
    return [executable or sys.executable, *flags, "-c", code, path]
