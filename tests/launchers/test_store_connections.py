"""How many connections a rank has to the store of its launcher."""

from __future__ import annotations

from pathlib import Path

from ..helpers.script_launch import launch

SCRIPT = """\
import os, psutil
import dualdist as hvd
for _ in range(2):
    hvd.init(backend="torch", transport="gloo")
    hvd.barrier()
    peers = [connection.raddr for connection in psutil.Process().net_connections()]
    number = sum(peer[1:] == (int(os.environ["MASTER_PORT"]),) for peer in peers)
    os.write(1, f"connections {number}\\n".encode())  # one write: print's parts mix with those of other ranks
    hvd.barrier()
    hvd.shutdown()
"""


def test_each_rank_has_one_connection_at_every_start(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    ended = launch("torchrun", str(path))
    assert ended.code == 0, ended.output
    assert ended.output.count("connections 1\n") == 4
