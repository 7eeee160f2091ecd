"""The program of one process of `run` and `spawn`: reads the task, runs it, and sends back the result or the exception.

It imports only the standard library, because it starts before it receives the parent's sys.path.
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

RETURNED, RAISED = "returned", "raised"


def main(task: int, result: int) -> None:
    """Run the task in the open file `task`, and write one message (kind, time, content) to the pipe `result`.

    RETURNED: content is the pickled result. RAISED: content is (the pickled exception or None, its traceback). Eight
    bytes before the pickled message hold its length.
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
        if (ending := sys.modules.get("dualdist.core.process")) is not None:
            ending.record_failure(error)
        _send(result, (RAISED, time.monotonic(), (_pickled(error), _traceback(error))))
        sys.exit(1)
    _send(result, message)


def _run(task: int) -> bytes:
    text = os.pread(task, os.fstat(task).st_size, 0)
    preparation, work = pickle.loads(text)
    process = multiprocessing.process.current_process()
    # multiprocessing's mark: with it, a script without an `if __name__ == "__main__"` guard raises instead of spawning.
    process._inheriting = True  # type: ignore[attr-defined]
    try:
        multiprocessing.spawn.prepare(preparation)
        function, args, kwargs = _unpickled(work)
    finally:
        del process._inheriting  # type: ignore[attr-defined]
    result = function(*args, **kwargs)
    try:
        return _dumps(result)
    except Exception as error:  # the user's class decides what pickling raises
        raise TypeError(
            f"The function must return an object that can be pickled, but returned a {type(result).__name__} instead: "
            f"{error}."
        ) from error


def _dumps(value: Any) -> bytes:
    """Return `value` pickled: with cloudpickle if the function was sent with it and `value` needs it."""
    try:
        return pickle.dumps(value)
    except Exception:  # the user's class decides what pickling raises
        if "cloudpickle" not in sys.modules:
            raise
        return bytes(sys.modules["cloudpickle"].dumps(value))


def _unpickled(work: bytes) -> Any:
    try:
        return pickle.loads(work)
    except AttributeError as error:
        # pickle's message: Can't get attribute 'f' on <module '__mp_main__' from ...>
        if "_main__'" not in str(error):
            raise
        raise AttributeError(f"{error}. Define it in its file outside `if __name__ == '__main__':`.") from error


def _pickled(error: BaseException) -> bytes | None:
    """Return `error` pickled, None when it cannot be pickled and restored."""
    try:
        data = _dumps(error)
        return data if type(pickle.loads(data)) is type(error) else None
    except Exception:  # the user's class decides what pickling raises
        return None


def _traceback(error: BaseException) -> str:
    """Return the traceback that Python prints for `error`, without the frames of this file."""
    shown = error.__traceback__
    while shown is not None and shown.tb_frame.f_code.co_filename == __file__:
        shown = shown.tb_next
    return "".join(traceback.format_exception(type(error), error, shown or error.__traceback__))


def _send(result: int, message: tuple[str, float, Any]) -> None:
    data = pickle.dumps(message)
    with open(result, "wb") as pipe:
        pipe.write(len(data).to_bytes(8, "big") + data)


if __name__ == "__main__":
    __file__ = sys.argv[1]
    main(int(sys.argv[2]), int(sys.argv[3]))
