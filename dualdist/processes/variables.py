"""The environment of the processes of a job: what they get from this one, and their place in the job.

Also how a command is started under mpirun.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence

from ..copies import COPIES, add_copies
from ..core.launch import SECRET, secret_in, without_copies
from ..core.launch.launchers import LAUNCHERS, NUMBERS
from ..core.meeting import KnownBoard, ServerAddress
from ..core.types import World
from ..errors import ConfigurationError
from ..site_launcher import NAMED_BY

RENDEZVOUS = "DUALDIST_RENDEZVOUS"
"""The variable with the address of the launcher's server."""

HOST_VARIABLES = (
    r"BASH_FUNC_.*|OLDPWD|.*CUDA_VISIBLE_DEVICES|_HOROVOD_SECRET_KEY"  # horovod/runner/common/util/env.py:24
    r"|HOME|USER|LOGNAME|SHELL|MAIL|PWD|SHLVL|_|HOSTNAME|DISPLAY|XAUTHORITY|TMPDIR|SSH_.*|XDG_.*|DBUS_.*"
)
"""A regular expression of variables that are valid only on this host or in this login session."""


def without_launchers(env: Mapping[str, str]) -> dict[str, str]:
    """Return `env` without the variables that launchers have set for this process."""
    env = without_copies(env)
    known = set(NAMED_BY.values()) | {getattr(row, field) for row in LAUNCHERS for field in NUMBERS}
    known |= {marker.partition("=")[0] for row in LAUNCHERS for marker in row.markers}
    known.add(COPIES)
    known |= {env[setting] for setting in NAMED_BY.values() if env.get(setting)}
    more = re.compile("|".join(row.more for row in LAUNCHERS if row.more))
    return {name: value for name, value in env.items() if name not in known and not more.fullmatch(name)}


def exportable(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables to send to other hosts: all but those of this host, as horovodrun does."""
    return {name: value for name, value in env.items() if not re.fullmatch(HOST_VARIABLES, name)}


def process_variables(launcher: str, world: World, rendezvous: str, secret: bytes) -> dict[str, str]:
    """Return the variables that give one process its place in the job. core/launch/ and core/meeting/ read them."""
    return {
        "DUALDIST_LAUNCHER": launcher,
        **{f"DUALDIST_{name.upper()}": str(getattr(world, name)) for name in NUMBERS},
        RENDEZVOUS: rendezvous,
        SECRET: secret.hex(),
    }


class LaunchersBoard(KnownBoard):
    """The server of `dualdist run` and `spawn`."""

    is_launchers = True

    def __init__(self, env: Mapping[str, str]) -> None:
        address = env[RENDEZVOUS]
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
            raise ConfigurationError(
                f"`{RENDEZVOUS}` must be 'host:port', but is {address!r} instead. The launcher sets it; look at what "
                "overwrites it."
            )
        super().__init__(
            ServerAddress([host], [int(port)], secret_in(env)),
            f"{RENDEZVOUS}={address}",
            "Check that the launcher still runs, and that no firewall is between the hosts.",
        )

    def serve(self, size: int) -> None:
        return None


def copied_variables(*groups: Mapping[str, str], given: Mapping[str, str]) -> dict[str, str]:
    """Return `groups` of variables, one for each launcher, and DUALDIST_COPIES.

    given: variables that the user has set for the processes. A group with one of them is left out: it would contradict.
    """
    copies: dict[str, str] = {}
    for group in groups:
        if given.keys().isdisjoint(group):
            add_copies(group, copies)
    return copies


def mpirun_command(size: int, command: Sequence[str]) -> list[str] | None:
    """Return the command line that runs `command` in `size` processes of this host; None if mpirun is not on PATH.

    Open MPI's mpirun is allowed to start more processes than there are cores, and to run as root.
    """
    mpirun = shutil.which("mpirun")
    if mpirun is None:
        return None
    options = ["-np", str(size)]
    if is_open_mpi(mpirun):
        options += ["--oversubscribe", *["--allow-run-as-root"] * (os.getuid() == 0)]
    return [mpirun, *options, *command]


@functools.cache
def is_open_mpi(mpirun: str) -> bool:
    """Return whether the program `mpirun` is that of Open MPI."""
    version = subprocess.run([mpirun, "--version"], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    return "Open MPI" in version.stdout
