"""`dualdist doctor --world` in a process with faults.

    python -m tests.helpers.faulty_doctor '{"host": "beta", "clock": 90, "path": "/folder", "absent": 2}' [options]

On the host, `time.time` is ahead by `clock` seconds, and Python finds packages in `path` first. The rank `absent` waits
until it is ended; the others begin when all processes have started, as files in the folder `begun` show, rank 0 last.
A process that is started with libfaketime cannot wait: time.sleep and Condition.wait fail in it.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any, cast

from dualdist.cli import main
from dualdist.core.launch import detect
from dualdist.core.meeting import Meeting
from dualdist.core.meeting.server import TEXT

from .files import wait_for


def arrive_in_turn(rank: int, other: int, folder: Path) -> None:
    """Let rank 0 arrive only when the `other` present rank waits for it, without a limit: it cannot be late.

    rank: of this process, one of the two. folder: the same for both.
    """
    patched, mark, wait = cast("tuple[Any, Any, Any]", (Meeting, folder / f"waits {other}", wait_for))
    gather, send = patched.gather, patched._send
    if rank == 0:
        patched.gather = lambda self, text: wait([mark]) or gather(self, text)
    else:
        os.environ["DUALDIST_START_TIMEOUT_SECONDS"] = "600"
        patched._send = lambda self, *sent: send(self, *sent) or (sent[0] == TEXT and mark.touch())


def run(faults: dict[str, object], options: list[str]) -> int:
    """Apply the faults that are those of this process, and run the command."""
    if "absent" in faults:
        launch, begun = detect(os.environ), Path(str(faults["begun"]))
        (begun / f"{launch.rank}").touch()
        wait_for(begun / f"{rank}" for rank in range(launch.size))
        if faults["absent"] == launch.rank:
            signal.pause()
        (other,) = {1, 2} - {faults["absent"]}
        arrive_in_turn(launch.rank, other, begun)
    if faults.get("host") == socket.gethostname():
        sys.path.insert(0, str(faults["path"]))
        right, ahead = time.time, float(str(faults["clock"]))
        time.time = lambda: right() + ahead
    return main(["doctor", "--world", *options])


if __name__ == "__main__":
    sys.exit(run(json.loads(sys.argv[1]), sys.argv[2:]))
