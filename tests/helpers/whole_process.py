"""Writes to a file what `init` changes in a script's process, what `shutdown` leaves, and more: FILE [SIGUSR2]."""

from __future__ import annotations

import gc
import json
import logging
import os
import resource
import signal
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed
import torch.utils.data

warnings.simplefilter("ignore")


def handle(number: int, frame: object) -> None:
    """Do nothing."""


def state() -> dict[str, Any]:
    """Return what code outside of dualdist sees: attributes of torch and Python, signals, limits, gc, threads."""
    found: dict[str, Any] = {}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in ("torch", *sys.stdlib_module_names):
            for key, value in list(vars(module).items()):
                found[f"{name}.{key}"] = value
                parts = list(vars(value).items()) if isinstance(value, type) else []
                found |= {f"{name}.{key}.{part}": attribute for part, attribute in parts}
    for number in sorted(signal.valid_signals()):
        found[f"handler of signal {int(number)}"] = signal.getsignal(number)
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(("SigBlk", "SigIgn", "SigCgt")):
            name, mask = line.split()
            found |= {f"{name} {number}": int(mask, 16) >> (number - 1) & 1 for number in range(1, 32)}
    limits = [name for name in dir(resource) if name.startswith("RLIMIT_")]
    found |= {name: resource.getrlimit(getattr(resource, name)) for name in limits}
    found |= {"gc": (gc.isenabled(), gc.get_threshold(), gc.get_freeze_count(), [*gc.callbacks])}
    found |= {f"thread {thread.name}": True for thread in threading.enumerate()}
    found |= {f"variable {name}": value for name, value in os.environ.items()}
    return (
        found
        | {"folder": Path.cwd(), "threads of torch": torch.get_num_threads()}
        | {"log": [*logging.getLogger().handlers]}
    )


def changed(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Return what differs. Modules may get attributes, such as those of modules in them."""
    new = [name for name in after.keys() - before.keys() if name.startswith(("thread ", "variable "))]
    plain = (int, str, tuple, list, Path)
    other = [
        name
        for name in before.keys() & after.keys()
        if before[name] is not after[name] and not (isinstance(before[name], plain) and before[name] == after[name])
    ]
    return sorted([*new, *other, *(before.keys() - after.keys())])


def main() -> None:
    signal.signal(signal.SIGTERM, handle)
    if "SIGUSR2" in sys.argv:
        signal.signal(signal.SIGUSR2, handle)
    before = state()
    import dualdist as hvd

    hvd.init()
    rank, begun = hvd.rank(), state()
    parts = [name for name in sys.modules if name.startswith(("dualdist.horovod", "dualdist.mpi"))]
    former = signal.signal(signal.SIGHUP, handle)
    hvd.allreduce(torch.ones(3))
    hvd.shutdown()
    handlers = [signal.getsignal(number) is handle for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2)]
    signal.signal(signal.SIGHUP, former)
    if rank == 0:
        found = changed(before, begun), changed(before, state()), handlers, parts
        Path(sys.argv[1]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
