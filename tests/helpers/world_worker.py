"""One rank of a test world: connects back to pytest and does what it is told until the connection ends.

    python -m tests.helpers.world_worker

under any launcher. See tests/helpers/world.py for the other end.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import resource
import sys
import traceback
import warnings
from multiprocessing.connection import Client, Connection
from typing import Any

DEVICE = "DUALDIST_TEST_DEVICE"
"""The environment variable with which ranks have the simulated accelerator: "default": each makes its device torch's
default; "own": each sees one device alone, so that all call theirs npu:0."""
ADDRESS, KEY, STACKS = "DUALDIST_TEST_ADDRESS", "DUALDIST_TEST_KEY", "DUALDIST_TEST_STACKS"
"""The environment variables that say where pytest listens, what it asks for, and where stacks are written."""

TESTS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


def main() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with open(os.path.join(os.environ[STACKS], str(os.getpid())), "w") as stacks:
        faulthandler.enable(stacks)  # pytest ends a world that hangs with SIGABRT
        host, _, port = os.environ[ADDRESS].rpartition(":")
        connection = Client((host, int(port)), authkey=os.environ[KEY].encode())
        connection.send(os.getpid())

        use_simulated_device()
        import torch

        import dualdist

        logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
        dualdist.init()
        if os.environ.get(DEVICE) == "default":
            torch.set_default_device(dualdist.device())
        connection.send(dualdist.rank())
        serve(connection)
        dualdist.shutdown()
        faulthandler.disable()


def use_simulated_device() -> None:
    """Have the device that the environment variable DEVICE asks for, if any."""
    if (how := os.environ.get(DEVICE)) is None:
        return
    from dualdist.devices import choice
    from tests.accelerator import register

    register("npu")
    if how == "own":
        names = (f"of rank {os.environ['LOCAL_RANK']}",)
        choice.visible = lambda *, by_uuid=False: names


def serve(connection: Connection[Any, Any]) -> None:
    """Run every (function, args, kwargs) that comes, until the other end closes."""
    while True:
        try:
            task = connection.recv_bytes()
        except EOFError:
            return
        connection.send(perform(task))


def perform(task: bytes) -> tuple[bool, Any]:
    """Return (True, the result) or (False, the traceback as text)."""
    import pickle

    import torch

    try:
        function, args, kwargs = pickle.loads(task)
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            # of torch 2.4's own torch.utils.checkpoint and DTensor
            warnings.filterwarnings("ignore", r"`torch\.cpu\.amp\.autocast", FutureWarning)
            warnings.filterwarnings("ignore", "DTensor random operators may not have complete support")
            result = getattr(function, "on_rank", function)(*args, **kwargs)
        return True, pickle.dumps(result)
    except BaseException as error:
        shown = traceback.TracebackException.from_exception(error, capture_locals=True)
        del shown.stack[0]  # this function
        for frame in shown.stack:
            if not frame.filename.startswith(TESTS):
                frame.locals = None
        return False, "".join(shown.format())


if __name__ == "__main__":
    main()
    sys.exit(0)
