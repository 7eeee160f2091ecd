"""python -m dualdist.compat train.py ARGS, or -m MODULE ARGS: runs it as plain python would."""

from __future__ import annotations

import importlib.util
import os
import runpy
import sys
from collections.abc import Sequence
from importlib.machinery import SourceFileLoader
from types import ModuleType

from . import __doc__ as description
from . import install

USAGE = "usage: python -m dualdist.compat SCRIPT [ARGS ...]\n       python -m dualdist.compat -m MODULE [ARGS ...]\n"


def main(argv: Sequence[str]) -> int:
    """Run the script or module that `argv` names as `__main__`. Return the exit status."""
    if argv and argv[0] in ("-h", "--help"):
        sys.stdout.write(f"{USAGE}\n{description}")
        return 0
    as_module = argv[:1] == ["-m"]
    if not argv[as_module:] or argv[as_module][:1] in ("", "-"):
        sys.stderr.write(USAGE)
        return 2
    install()
    return run(argv)


def run(argv: Sequence[str]) -> int:
    """Run the script or module that `argv` names as `__main__`, as it is. Return the exit status."""
    if argv[0] == "-m":
        return _run_module(argv[1], argv[2:])
    path = argv[0]
    if not os.path.isfile(path):
        sys.stderr.write(f"dualdist.compat: SCRIPT must be a file, but {path!r} is not one.\n")
        return 2
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.path.dirname(os.path.realpath(path))
    sys.argv = list(argv)
    script = ModuleType("__main__")
    script.__file__ = os.path.abspath(path)
    script.__loader__ = SourceFileLoader("__main__", script.__file__)
    # Not undone, unlike in runpy.run_path: pickle and exit handlers need it.
    sys.modules["__main__"] = script
    exec(compile(script.__loader__.get_data(path), script.__file__, "exec"), vars(script))
    return 0


def _run_module(name: str, arguments: Sequence[str]) -> int:
    try:
        found = importlib.util.find_spec(name)
    except ModuleNotFoundError:
        found = None
    if found is None:
        sys.stderr.write(f"dualdist.compat: MODULE must be importable, but there is no module {name!r}.\n")
        return 2
    sys.argv = [name, *arguments]
    runpy.run_module(name, run_name="__main__", alter_sys=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
