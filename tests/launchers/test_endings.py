"""How a job fails: the first error is reported once, and no process is left. test_compat.py tests success."""

from __future__ import annotations

from pathlib import Path

import pytest

from ..helpers.script_launch import LAUNCHERS, launch

TOGETHER = [name for name, launcher in LAUNCHERS.items() if launcher.size == 2]

SCRIPT = """\
import sys, torch, dualdist as hvd
hvd.init()
assert hvd.size() == 2
hvd.allreduce(torch.ones(4))
if sys.argv[1] == "raise" and hvd.rank() == 1:
    raise RuntimeError("the reason")
if sys.argv[1] == "exit" and hvd.rank() == 1:
    sys.exit(3)
hvd.allreduce(torch.ones(4))
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return str(path)


@pytest.mark.parametrize("name", TOGETHER)
def test_an_exception_on_one_rank_ends_all_and_is_reported_once(name: str, script: str) -> None:
    ended = launch(name, script, "raise")
    assert ended.code != 0
    assert ended.output.count("RuntimeError: the reason") == 1


def test_an_exit_code_of_one_rank_ends_all(script: str) -> None:
    assert launch("mpirun", script, "exit").code != 0


def test_ranks_that_outlive_the_first_print_no_frames_of_c10d(tmp_path: Path) -> None:
    """Rank 0 serves the store. What the other rank does without it must not log c10d's stack again and again."""
    script = tmp_path / "script.py"
    script.write_text(
        "import os, select, dualdist as hvd\n"
        "hvd.init()\n"
        "first = os.pidfd_open(hvd.broadcast_object(os.getpid(), 0))\n"
        "hvd.barrier()\n"
        "if hvd.rank() == 1:\n"
        "    select.select([first], [], [])\n"
        "    try:\n"
        "        hvd.barrier()\n"
        "    except hvd.HorovodInternalError as error:\n"
        "        print(error)\n"
    )
    ended = launch("mpirun-torch", str(script), environment={"DUALDIST_STALL_WARN_SECONDS": "0.2"})
    assert ended.code == 0, ended.output
    assert "rank 0: process ended" in ended.output and len(ended.output.splitlines()) == 3, ended.output


def test_a_world_that_is_not_the_launched_one_is_an_error_on_every_rank(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, horovod.torch\n"
        "horovod.torch.init()  # a world of one under torchrun\n"
        "import dualdist\n"
        "try:\n"
        "    dualdist.init()\n"
        "except dualdist.WorldMismatchError as error:\n"
        "    os.write(1, f'<{error}>\\n'.encode())\n"
    )
    ended = launch("torchrun", str(script))
    assert ended.code == 0, ended.output
    errors = [line for line in ended.output.splitlines() if line.startswith("<")]
    assert len(errors) == 2
    for line in errors:
        assert "World size must be the 2 (from WORLD_SIZE)" in line
        assert "but is 1 instead in horovod" in line
        assert "Do not start the backend before dualdist.init()" in line


@pytest.mark.parametrize("method", ["file", "tcp"])
def test_init_method_joins_processes_without_a_launcher(method: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, torch, torch.multiprocessing as mp, dualdist as hvd\n"
        "def work(rank, address):\n"
        "    hvd.init(init_method=address, rank=rank, world_size=2)\n"
        "    assert hvd.allgather(torch.tensor([hvd.rank()])).tolist() == [0, 1]\n"
        "    assert (hvd.local_rank(), hvd.local_size()) == (rank, 2)\n"
        "if __name__ == '__main__':\n"
        "    import socket\n"
        "    free = socket.socket(); free.bind(('127.0.0.1', 0))\n"
        "    port = free.getsockname()[1]; free.close()\n"
        "    address = sys.argv[1] if sys.argv[1] != 'tcp' else f'tcp://127.0.0.1:{port}'\n"
        "    mp.spawn(work, (address,), nprocs=2)\n"
    )
    ended = launch("python", str(script), f"file://{tmp_path}/meeting" if method == "file" else "tcp")
    assert (ended.code, ended.output) == (0, "")
