"""`dualdist hang` names the rank that the others wait for, and its line, from the files that the ranks have written."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import pickle
import re
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import dualdist as hvd
from dualdist.cli import main
from dualdist.core.world import current

from ..helpers import world as world_module
from ..helpers.files import wait_for
from ..helpers.rejoining import rejoin
from ..helpers.world import WORLDS, WorldFailure, started
from .test_stopped_rank import stop

CASES = ["torch-gloo-3", "torch-mpi-3", "horovod-gloo-3", "horovod-mpi-3"]
LATE = 2
HAS_ANALYSER = importlib.util.find_spec("torch.distributed.flight_recorder") is not None
"""Whether this torch brings its analyser in the wheel."""


def line_of(marker: str) -> str:
    """Return 'file:line' of the only line of this file that ends with the comment `marker`."""
    lines = Path(__file__).read_text().splitlines()
    (number,) = (number for number, line in enumerate(lines, 1) if line.endswith(f"  # {marker}"))
    return f"{__file__}:{number}"


def load_batch(files: list[Path], *, asks: bool = False) -> None:
    """Wait for a batch that another thread brings when the others have given up. asks: for all files, meanwhile."""
    ready, waiting, line = threading.Event(), sys._getframe(), line_of("loads")

    def bring() -> None:
        while asks and not line.endswith(f":{waiting.f_lineno}"):
            pass
        if asks:
            os.kill(os.getpid(), signal.SIGUSR2)
        wait_for(files)
        ready.set()

    threading.Thread(target=bring, daemon=True).start()
    ready.wait()  # loads


def multiply(files: list[Path]) -> None:
    """Compute in C, in one line, until all `files` exist."""
    matrix, begun = torch.zeros(1500, 1500), files[0].with_name("begun")
    while begun.write_text(f"{(matrix @ matrix)[0, 0]}") and not all(map(Path.exists, files)):  # multiplies
        pass


def sleep_in_loader(files: list[Path]) -> None:
    load_batch(files)


def skip_call(files: list[Path]) -> None:
    with pytest.raises(hvd.CollectiveMismatchError):
        hvd.barrier()  # skips
    wait_for(files)


def be_stopped(files: list[Path]) -> None:
    stop()


def keep_lock(files: list[Path]) -> None:
    """Wait in C, with Python's global lock, until rank 0 opens the pipe."""
    os.mkfifo(files[0].with_name("pipe"))
    ctypes.PyDLL(None).open(os.fsencode(files[0].with_name("pipe")), os.O_RDONLY)


def be_killed(files: list[Path]) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def be_asked(folder: Path) -> None:
    """Let rank 0 send SIGUSR2 to the last rank, which computes in C."""
    join_with(folder)
    processes = hvd.allgather_object(os.getpid())
    folder.mkdir(exist_ok=True)
    files = [folder / f"rank-{rank}.json" for rank in range(hvd.size())]
    if hvd.rank() == LATE:
        multiply(files)
    if hvd.rank() == 0:
        wait_for([folder / "begun"])
        os.kill(processes[LATE], signal.SIGUSR2)
    wait_for(files)


def wait_in_torch(is_sharded: bool, folder: Path) -> None:
    """Let the others wait in torch.distributed for the last rank, which asks all for their files.

    is_sharded: in a forward of a model that FSDP2 has sharded.
    """
    join_with(folder, timeout=60)  # until the last rank comes
    folder.mkdir(exist_ok=True)
    model: Any = torch.nn.Linear(2, hvd.size())
    if is_sharded:
        from torch.distributed.fsdp import fully_shard

        fully_shard(model, mesh=hvd.device_mesh())
    hvd.barrier()
    files = [folder / f"rank-{rank}.json" for rank in range(hvd.size())]
    if hvd.rank() == LATE:
        watch: Any = current().observation.watch  # type: ignore[attr-defined]
        for rank in range(LATE):
            while watch._ask(rank, ["position", "set 0", ["", None]], 60.0)[1] != "torch.distributed":
                pass
        load_batch(files, asks=True)
    if is_sharded:
        model(torch.ones(1, 2))  # waits for weights
    else:
        torch.distributed.all_reduce(torch.ones(2))  # waits for the last


def join_with(folder: Path, timeout: int = 2) -> None:
    """Join the world again, with `folder` for the files. timeout: of collectives, in seconds."""
    os.environ |= {"DUALDIST_DUMP_DIR": str(folder), "DUALDIST_STALL_TIMEOUT_SECONDS": f"{timeout}"}
    rejoin()


def note_of(where: Callable[[list[Path]], None], folder: Path) -> str:
    """Sum over all ranks but the last one, which does `where` instead. Return the note of this rank's error."""
    join_with(folder)
    hvd.allreduce(torch.ones(5000), name="first")
    processes = hvd.allgather_object(os.getpid())
    folder.mkdir(exist_ok=True)
    files = [folder / f"gave up {rank}" for rank in range(LATE)]
    if hvd.rank() == LATE:
        where([*files, folder / f"rank-{LATE}.json"])
        return ""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # of the launcher of a killed rank
    with pytest.raises(hvd.HorovodInternalError) as caught:
        hvd.allreduce(torch.ones(5000), name="loss")  # waits
    files[hvd.rank()].touch()
    wait_for([*files, *(folder / f"rank-{rank}.json" for rank in range(LATE))])
    if hvd.rank() == 0 and where is be_stopped:
        os.kill(processes[LATE], signal.SIGCONT)
    if hvd.rank() == 0 and where is keep_lock:
        (folder / "pipe").write_text("")
    return "\n".join(getattr(caught.value, "__notes__", [str(caught.value)]))


def named_by_analyser(folder: Path, caplog: pytest.LogCaptureFixture) -> set[int]:
    """Return the ranks that torch's analyser names in the files in `folder`.

    Those that miss the last collective, have no file, or call something else than most; it compares all with any one.
    """
    if not HAS_ANALYSER:
        return {LATE}
    from torch.distributed.flight_recorder import fr_trace

    caplog.clear()
    fr_trace.main([str(folder), "--prefix", "rank_", "--allow-incomplete-ranks", "-o", f"{folder}.db"])
    _, database = pickle.loads(Path(f"{folder}.db").read_bytes())
    last = database.collectives[-1]
    if last.mismatch_collectives:
        differ = set(last.mismatch_collectives)
        return min(differ, last.expected_ranks - differ, key=len)
    without_file = re.search(r"missed FR dumps from ranks \(\{(\d)\}\)", caplog.text)
    return last.missing_ranks or {int(without_file[1]) if without_file else -1}


# torch's analyser warns on Python 3.13.
@pytest.mark.only_ci
@pytest.mark.filterwarnings("ignore:Failing to pass a value:DeprecationWarning")
@pytest.mark.parametrize("name", CASES)
def test_the_rank_that_is_behind_is_named_with_its_line(
    name: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def read(folder: Path) -> str:
        assert main(["hang", str(folder), "--flight-recorder", f"{folder}/traces"]) == 0
        assert named_by_analyser(folder / "traces", caplog) == {LATE}
        return capsys.readouterr().out

    def report(where: Callable[[list[Path]], None]) -> str:
        folder = tmp_path / where.__name__
        notes = world.run(note_of, where, folder)
        for note in notes[:LATE]:
            assert note.endswith(f"read them with `dualdist hang {folder}`.")
        return read(folder)

    with started(*WORLDS[name], {"DUALDIST_STALL_TIMEOUT_SECONDS": "2"}) as world:
        world.run(be_asked, tmp_path / "asked")
        assert main(["hang", str(tmp_path / "asked")]) == 0
        found = capsys.readouterr().out
        assert ": a rank received SIGUSR2.\n" in found
        assert f"\nRanks [2]: in no collective, in multiply at {line_of('multiplies')}: " in found
        for is_sharded, marker in ((False, "waits for the last"), (True, "waits for weights")):
            world.run(wait_in_torch, is_sharded, tmp_path / marker)
            assert main(["hang", str(tmp_path / marker)]) == 0
            found = capsys.readouterr().out
            assert f"It is in load_batch at {line_of('loads')}: " in found
            assert "\n  ranks [0, 1] wait in torch.distributed\n" in found and found.count("is behind") == 1
            line = f"in wait_in_torch at {line_of(marker)}: "
            assert re.search(rf": waiting in torch.distributed \(\w+\), {re.escape(line)}", found), found
        for where, function, marker in (
            (sleep_in_loader, "load_batch", "loads"),
            (multiply, "multiply", "multiplies"),
            (skip_call, "skip_call", "skips"),
        ):
            found = report(where)
            assert re.search(rf"\nRank 2 is behind, .*\. It is in {function} at {line_of(marker)}: ", found), found
            assert re.search(rf"\n  ranks \[0, 1\] wait for call 3 of set 0 since .* at {line_of('waits')}\n", found)
            assert "Rank 0 is behind" not in found and "Rank 1 is behind" not in found
        assert "\nRank 2 has no file of this time: it is stopped.\n" in report(be_stopped)
        locked = "it runs: it is about to end, a thread keeps Python's global lock, or it is slow"
        assert f"\nRank 2 has no file of this time: {locked}.\n" in report(keep_lock)
        # The others end with their errors, when they have written.
        monkeypatch.setattr(world_module, "OTHERS_SECONDS", world_module.RUN_SECONDS)
        with pytest.raises(WorldFailure):
            world.run(note_of, be_killed, tmp_path / "killed")
    found = read(tmp_path / "killed")
    assert "\nRank 2 has no file of this time: its process has ended.\n" in found
    assert f"\nRanks [0, 1]: waiting in allreduce of set 0, in note_of at {line_of('waits')}: " in found
