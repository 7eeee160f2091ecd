"""Other hosts on this machine: names behind which a real sshd is, one for each connection, without a port."""

from __future__ import annotations

import getpass
import os
import shutil
import subprocess
from pathlib import Path

from .requirements import need

SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")

_SERVER = """\
HostKey {folder}/host
AuthorizedKeysFile {folder}/user.pub
PidFile none
StrictModes no
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
LogLevel QUIET
"""
_CLIENT = """\
Host hostA hostB
  HostName 127.0.0.1
  ProxyCommand {sshd} -i -f {folder}/sshd_config
Host closed
  ProxyCommand sh -c 'echo the gate is shut >&2'
Host silent
  ProxyCommand exec sleep 1000
Host *
  User {user}
  HostKeyAlias here
  UserKnownHostsFile {folder}/known_hosts
  IdentityFile {folder}/user
  IdentitiesOnly yes
  LogLevel ERROR
"""


def start_hosts(folder: Path) -> str:
    """Return the value of DUALDIST_SSH with which hostA and hostB can be reached, `closed` and `silent` cannot."""
    need(SSHD is not None, "needs sshd")
    if os.geteuid() == 0:
        # Debian's sshd runs its unprivileged part in this empty folder.
        Path("/run/sshd").mkdir(exist_ok=True)
    for name in ("host", "user"):
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", f"{folder}/{name}"], check=True, timeout=20
        )
    facts = {"folder": folder, "sshd": SSHD, "user": getpass.getuser()}
    (folder / "sshd_config").write_text(_SERVER.format(**facts))
    (folder / "ssh_config").write_text(_CLIENT.format(**facts))
    (folder / "known_hosts").write_text(f"here {(folder / 'host.pub').read_text()}")
    return f"ssh -F {folder}/ssh_config"
