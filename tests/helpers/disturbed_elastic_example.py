"""Runs examples/elastic.py, unchanged, and has things happen to it at given steps, each once.

python disturbed_elastic_example.py FOLDER STEP:EVENT[:ARGUMENT] ...

kill: the last rank is killed in the step, before it commits. add, remove: a host comes or goes, and rank 0 trains on
when the launcher has said so. FOLDER gets what has happened: `began`, a line "step size" for each time that the
training function was called, and `seen.json`, the samples of all committed steps.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dualdist as hvd

EXAMPLE = Path(__file__).parents[2] / "examples" / "elastic.py"
FOLDER = Path(sys.argv[1])
EVENTS = {int(step): tuple(rest.split(":", 1)) for step, _, rest in (text.partition(":") for text in sys.argv[2:])}
SECONDS = 60.0


class Recording(hvd.elastic.ElasticSampler):
    """Knows which samples this rank had in its last batch."""

    last: tuple[int, ...] = ()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        batch = self.indices[batch_idx * batch_size :][:batch_size]
        self.last = tuple(self.epoch * len(self.dataset) + index for index in batch)
        super().record_batch(batch_idx, batch_size)


class Disturbed(hvd.elastic.TorchState):
    """Makes the events happen in `commit`."""

    def __init__(self, *arguments: Any, **values: Any) -> None:
        self.seen: list[int] = []
        super().__init__(*arguments, seen=self.seen, **values)
        self.told = threading.Event()

    def on_hosts_updated(self, timestamp: float, update_res: int) -> None:
        super().on_hosts_updated(timestamp, update_res)
        self.told.set()

    def commit(self) -> None:
        for samples in hvd.allgather_object(self.sampler.last):
            self.seen = [*self.seen, *samples]
        what, *arguments = EVENTS.get(self.step, (None,)) if not happened(self.step) else (None,)
        if what == "kill" and hvd.rank() == hvd.size() - 1:
            note(self.step)
            os.kill(os.getpid(), signal.SIGKILL)
        super().commit()
        if what in ("add", "remove"):
            HOSTS[hvd.launcher_name(), what](self, *arguments)


def happened(step: int) -> bool:
    return (FOLDER / f"event-{step}").exists()


def note(step: int) -> None:
    (FOLDER / f"event-{step}").touch()


def start_agent(state: Disturbed) -> None:
    """Have the second torchrun started, and wait to be ended by the first."""
    if hvd.rank() == 0:
        note(state.step)
        (FOLDER / "start").write_text("now\n")  # a FIFO, from which a shell reads
    signal.pause()


def end_agent(state: Disturbed) -> None:
    """Have the second torchrun vanish with its process. The others notice by themselves."""
    if "SECOND" in os.environ:
        note(state.step)
        os.kill(os.getppid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)


def change_hosts(state: Disturbed, hosts: str) -> None:
    """Have the discovery script tell other hosts, and go on when horovodrun has told rank 0."""
    state.told.clear()
    if hvd.rank() == 0:
        note(state.step)
        fresh = FOLDER / "hosts.new"
        fresh.write_text(hosts.replace(",", "\n") + "\n")
        fresh.rename(FOLDER / "hosts")
        assert state.told.wait(SECONDS), "horovodrun has not told of the hosts"
    state.check_host_updates()


HOSTS: dict[tuple[str, str], Callable[..., None]] = {
    ("torchrun", "add"): start_agent,
    ("torchrun", "remove"): end_agent,
    ("horovodrun", "add"): change_hosts,
    ("horovodrun", "remove"): change_hosts,
}


def recording_run(train: Callable[..., None]) -> Callable[..., None]:
    def recorded(state: Disturbed, *arguments: Any) -> None:
        if hvd.rank() == 0:
            with open(FOLDER / "began", "a") as file:
                file.write(f"{state.step} {hvd.size()}\n")
        train(state, *arguments)
        if hvd.rank() == 0:
            (FOLDER / "seen.json").write_text(json.dumps(state.seen))

    return run(recorded)


run = hvd.elastic.run
hvd.elastic.run = recording_run  # type: ignore[assignment]
hvd.elastic.TorchState, hvd.elastic.ElasticSampler = Disturbed, Recording  # type: ignore[misc]
runpy.run_path(str(EXAMPLE), run_name="__main__")
