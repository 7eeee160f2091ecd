"""`dualdist doctor --world` in a process with faults.

    python -m tests.helpers.faulty_doctor '{"host": "beta", "clock": 90, "path": "/folder", "absent": 2}' [options]

On the host, `time.time` is ahead by `clock` seconds, and Python finds packages in `path` first. The rank `absent` waits
until it is ended; the others begin when all processes have started, as files in the folder `begun` show. A process that
is started with libfaketime cannot wait: time.sleep and Condition.wait fail in it.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

from dualdist.cli import main
from dualdist.launch import detect

from .files import wait_for


def run(faults: dict[str, object], options: list[str]) -> int:
    """Apply the faults that are those of this process, and run the command."""
    if "absent" in faults:
        launch, begun = detect(os.environ), Path(str(faults["begun"]))
        (begun / f"{launch.rank}").touch()
        wait_for(begun / f"{rank}" for rank in range(launch.size))
        if faults["absent"] == launch.rank:
            signal.pause()
    if faults.get("host") == socket.gethostname():
        sys.path.insert(0, str(faults["path"]))
        right, ahead = time.time, float(str(faults["clock"]))
        time.time = lambda: right() + ahead
    return main(["doctor", "--world", *options])


if __name__ == "__main__":
    sys.exit(run(json.loads(sys.argv[1]), sys.argv[2:]))
