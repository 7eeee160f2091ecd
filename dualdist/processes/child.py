"""One process of `spawn`: reads what to run, runs it, and sends back what came of it.

It is run by its path, so that it works before sys.path is that of the parent, and imports the standard library alone.
"""

from __future__ import annotations

import multiprocessing.process
import multiprocessing.spawn
import os
import pickle
import sys
import time
import traceback
from typing import Any

__all__ = ("RAISED", "RETURNED", "main")

RETURNED, RAISED = "returned", "raised"


def main(task: int, result: int) -> None:
    """Run what is in the open file `task`, and write (kind, time, what it is) to the pipe `result`.

    RETURNED: the pickled result. RAISED: (the pickled exception or None, its traceback). Eight bytes in front tell the
    length.
    """
    for descriptor in (task, result):
        os.set_inheritable(descriptor, False)
    try:
        message = (RETURNED, time.monotonic(), _run(task))
    except SystemExit as leaving:
        if leaving.code not in (None, 0):
            raise
        message = (RETURNED, time.monotonic(), pickle.dumps(None))
    except BaseException as error:
        _send(result, (RAISED, time.monotonic(), (_pickled(error), _traceback(error))))
        sys.exit(1)
    _send(result, message)


def _run(task: int) -> bytes:
    text = os.pread(task, os.fstat(task).st_size, 0)
    preparation, work = pickle.loads(text)
    process = multiprocessing.process.current_process()
    process._inheriting = True  # type: ignore[attr-defined] # so that a script without a guard does not start more
    try:
        multiprocessing.spawn.prepare(preparation)
        function, args = _unpickled(work)
    finally:
        del process._inheriting  # type: ignore[attr-defined]
    result = function(*args)
    try:
        return pickle.dumps(result)
    except Exception as error:  # the user's class decides what pickling raises
        raise TypeError(
            f"`function` must return what can be pickled, but returned a {type(result).__name__} instead: {error}."
        ) from error


def _unpickled(work: bytes) -> Any:
    try:
        return pickle.loads(work)
    except AttributeError as error:
        # pickle's words: Can't get attribute 'f' on <module '__mp_main__' from ...>
        if "_main__'" not in str(error):
            raise
        raise AttributeError(
            f"{error}. What is spawned must be defined in its file outside `if __name__ == '__main__':`."
        ) from error


def _pickled(error: BaseException) -> bytes | None:
    """Return `error` pickled, None when it does not survive that."""
    try:
        data = pickle.dumps(error)
        return data if type(pickle.loads(data)) is type(error) else None
    except Exception:  # the user's class decides what pickling raises
        return None


def _traceback(error: BaseException) -> str:
    """Return what python prints of `error`, without the frames of this file."""
    shown = traceback.TracebackException.from_exception(error)
    own = [place for place, frame in enumerate(shown.stack) if frame.filename == __file__]
    if len(own) < len(shown.stack):
        del shown.stack[: max(own, default=-1) + 1]
    return "".join(shown.format())


def _send(result: int, message: tuple[str, float, Any]) -> None:
    data = pickle.dumps(message)
    view = memoryview(len(data).to_bytes(8, "big") + data)
    while view:
        view = view[os.write(result, view) :]


if __name__ == "__main__":
    __file__ = sys.argv[1]
    main(int(sys.argv[2]), int(sys.argv[3]))
