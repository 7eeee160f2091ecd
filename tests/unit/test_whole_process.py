"""`init` changes nothing of a script's process but what is listed here, and `shutdown` takes back most of that."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ..helpers import whole_process

DUALDIST_RUN = [sys.executable, "-m", "dualdist", "run", "-np", "2"]
VARIABLES = """
    DUALDIST_COPIES GLOO_SOCKET_IFNAME GROUP_RANK GROUP_WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT
    RANK ROLE_NAME ROLE_RANK ROLE_WORLD_SIZE WORLD_SIZE
"""

CHANGED = {
    **{f"variable {name}": "torchrun's variables, for frameworks and scripts" for name in VARIABLES.split()},
    "torch.distributed.distributed_c10d._group_count": "torch's default group, for programs that use it",
}
"""What `init` changes -> why."""
WITH_OTHERS = {
    "thread dualdist-stall": "looks for calls that wait too long",
    "thread dualdist-status": "answers what this rank does, also while it computes",
    "SigCgt: 12": "SIGUSR2 lets all ranks write what they do",
}
"""The same, in a world of several ranks."""
STAYS = {
    "sys.excepthook": "torch's init_process_group shows the rank in tracebacks",
    "torch._custom_class_base._FakeScriptObject_cls": "torch has loaded what it loads late",
    "torch.distributed.distributed_c10d._backend": "the same",
    "asyncio.events._event_loop_policy": "Python has made what it makes late",
}
"""What `shutdown` leaves."""


@pytest.mark.only_ci(where=lambda launcher, own: not launcher or not own)
@pytest.mark.parametrize("own", [[], ["SIGUSR2"]], ids=["", "SIGUSR2 is handled"])
@pytest.mark.parametrize("launcher", [[], DUALDIST_RUN], ids=["alone", "two"])
def test_init_changes_only_what_is_listed(launcher: list[str], own: list[str], tmp_path: Path) -> None:
    command = [*launcher, sys.executable, whole_process.__file__, str(tmp_path / "found"), *own]
    subprocess.run(command, timeout=120, check=True)
    begun, left, handlers, parts = json.loads((tmp_path / "found").read_text())
    in_world = {name: why for name, why in WITH_OTHERS.items() if launcher and not (own and "SigCgt" in name)}
    assert set(begun) - STAYS.keys() - CHANGED.keys() == in_world.keys()
    assert set(left) - STAYS.keys() == set()
    assert handlers == [True, True, bool(own)]
    assert parts == [], "neither Horovod nor MPI takes part"
