"""Two hosts on this one: namespaces with a name, network interfaces and an sshd of their own, joined by two bridges.

Each host has three interfaces: `dead0`, whose network nobody else is on though all have an address there, and `net0`
and `net1`, which reach the other. The hosts' own names lead to addresses that are of no use to the other, as many
do: to 127.0.1.1, as Debian has it, and to that of `dead0`. A namespace lasts as long as the process that holds it,
which ends with pytest, so that nothing is left behind.
"""

from __future__ import annotations

import contextlib
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from .requirements import need, need_programs, need_root, program
from .script_launch import MARK, STACKS, Ended, environment, finish
from .world import ROOT

SECONDS = 60.0
LINKS = ("net0", "net1")
"""The interfaces that reach the other host."""
SUBNETS = {"dead0": "10.251.7", "net0": "10.252.7", "net1": "10.253.7"}
"""The first three numbers of each interface's addresses."""

SSHD = """\
Port 22
HostKey {folder}/key
AuthorizedKeysFile {folder}/key.pub
PermitRootLogin yes
PasswordAuthentication no
StrictModes no
UsePAM no
UseDNS no
PidFile none
# Open MPI opens as many sessions at once as there are hosts.
MaxStartups 100
"""
SSH = """\
IdentityFile {folder}/key
UserKnownHostsFile /dev/null
StrictHostKeyChecking no
LogLevel ERROR
"""

OPEN_MPI = MappingProxyType(
    {
        "OMPI_MCA_btl": "tcp,self",
        "OMPI_MCA_btl_tcp_if_include": "net0",
        "OMPI_MCA_oob_tcp_if_include": "net0",
        "OMPI_MCA_hwloc_base_binding_policy": "none",
    }
)
"""Open MPI needs to know which interface leads to the other host. mpirun passes these variables on."""


def size_of(hosts: str) -> int:
    """Return the number of processes on hosts such as "alpha:2,beta:1"."""
    return sum(int(host.partition(":")[2]) for host in hosts.split(","))


def mpirun(hosts: str, *names: str) -> tuple[str, ...]:
    """Return Open MPI's start of a command on hosts such as "alpha:2,beta:1". names: of more variables to pass on."""
    passed = ("PYTHONPATH", "OMP_NUM_THREADS", *STACKS, MARK, *names)
    options = ("--allow-run-as-root", "--oversubscribe", *(word for name in passed for word in ("-x", name)))
    return ("mpirun", *options, "-H", hosts, "-np", f"{size_of(hosts)}")


_UNSHARE = ("unshare", "--net", "--uts", "--mount")


@dataclass(frozen=True)
class Host:
    """One host of the network."""

    name: str
    pid: int
    """The process that holds its namespaces."""
    number: int

    def address(self, interface: str = "net0") -> str:
        """Return the address that this host has on an interface."""
        return f"{SUBNETS[interface]}.{self.number}"

    def command(self, *command: str) -> tuple[str, ...]:
        """Return the command that runs `command` on this host."""
        return ("nsenter", f"--target={self.pid}", "--net", "--uts", "--mount", "--", *command)

    def run(self, *command: str) -> None:
        """Run a command on this host. Raises AssertionError when it fails."""
        _run(*self.command(*command))


@dataclass(frozen=True)
class Network:
    """Hosts that are up."""

    hosts: tuple[Host, ...]

    def finish(self, *command: str, environment: Mapping[str, str] | None = None, forks: bool = True) -> Ended:
        """Run a command on the first host to its end; see script_launch.finish."""
        variables = {**OPEN_MPI, "PYTHONPATH": str(ROOT), **(environment or {})}
        return finish(self.hosts[0].command(*command), variables, forks=forks)

    @contextlib.contextmanager
    def cut(self) -> Iterator[None]:
        """Take every link between the hosts down meanwhile; nobody is told."""
        with self._changed("ip link set {} down", "ip link set {} up"):
            yield

    @contextlib.contextmanager
    def slow(self, rate: str, hosts: slice = slice(-1, None)) -> Iterator[None]:
        """Limit what `hosts` send over each link meanwhile. rate: as for `tc`, such as "8mbit"."""
        limit = f"tc qdisc add dev {{}} root tbf rate {rate} burst 64kb latency 400ms"
        with self._changed(limit, "tc qdisc del dev {} root", hosts):
            yield

    @contextlib.contextmanager
    def _changed(self, change: str, repair: str, hosts: slice = slice(-1, None)) -> Iterator[None]:
        """Run `change` for each link on `hosts`, by default the last one, and `repair` afterwards."""
        links = [(host, link) for host in self.hosts[hosts] for link in LINKS]
        for host, link in links:
            host.run(*change.format(link).split())
        try:
            yield
        finally:
            for host, link in links:
                host.run(*repair.format(link).split())


@contextlib.contextmanager
def running_network(names: tuple[str, ...] = ("alpha", "beta")) -> Iterator[Network]:
    """Make the hosts, with an sshd that takes a key made for the occasion, and end them afterwards."""
    need_root()
    need_programs("unshare", "nsenter", "ip", "sshd", "ssh", "ssh-keygen")
    allowed = subprocess.run([*_UNSHARE, "true"], capture_output=True, timeout=SECONDS)
    need(allowed.returncode == 0, f"needs namespaces: {allowed.stderr.decode().strip()}")
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="network-")))
        _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", f"{folder}/key")
        for name, text in {"sshd_config": SSHD, "ssh_config": SSH}.items():
            (folder / name).write_text(text.format(folder=folder))
        switch = Host("switch", _hold(stack), 0)
        for interface in LINKS:
            switch.run("ip", "link", "add", interface, "type", "bridge")
            switch.run("ip", "link", "set", interface, "up")
        hosts = tuple(Host(name, _hold(stack), 1 + place) for place, name in enumerate(names))
        for host in hosts:
            _wire(host, switch)
            _furnish(host, hosts, folder)
            _serve_ssh(host, folder, stack)
        yield Network(hosts)


def _hold(stack: contextlib.ExitStack) -> int:
    """Start a process in new namespaces, which ends when this one does, and return its id once it is there."""
    holder = subprocess.Popen(
        [*_UNSHARE, "sh", "-c", "echo there; exec cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    stack.callback(holder.wait, SECONDS)
    assert holder.stdin is not None and holder.stdout is not None
    stack.callback(holder.stdin.close)
    stack.callback(holder.stdout.close)
    assert holder.stdout.readline() == b"there\n"
    return holder.pid


def _wire(host: Host, switch: Host) -> None:
    host.run("ip", "link", "set", "lo", "up")
    for interface in SUBNETS:
        port = f"{interface}-{host.name}"
        switch.run("ip", "link", "add", port, "type", "veth", "peer", "name", interface, "netns", f"{host.pid}")
        if interface in LINKS:
            switch.run("ip", "link", "set", port, "master", interface)
        switch.run("ip", "link", "set", port, "up")
        host.run("ip", "address", "add", f"{host.address(interface)}/24", "dev", interface)
        host.run("ip", "link", "set", interface, "up")


def _furnish(host: Host, hosts: tuple[Host, ...], folder: Path) -> None:
    """Give the host its name, the names of the others, and the configuration of ssh."""
    own = "127.0.1.1" if host.number == 1 else host.address("dead0")
    names: Mapping[str, str] = {other.name: other.address() for other in hosts} | {host.name: own}
    file = folder / f"hosts-{host.name}"
    file.write_text("".join(f"{address} {name}\n" for name, address in {"localhost": "127.0.0.1", **names}.items()))
    host.run("hostname", host.name)
    host.run("mount", "--bind", f"{file}", "/etc/hosts")
    host.run("mount", "--bind", f"{folder}/ssh_config", "/etc/ssh/ssh_config")
    host.run("mount", "-t", "tmpfs", "none", "/run")
    host.run("mkdir", "/run/sshd")


def _serve_ssh(host: Host, folder: Path, stack: contextlib.ExitStack) -> None:
    """Start the host's sshd. Its sessions run on the host, since a process keeps its parent's namespaces."""
    command = host.command(program("sshd"), "-D", "-e", "-f", f"{folder}/sshd_config")
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    stack.callback(server.wait, SECONDS)
    stack.callback(server.terminate)
    assert server.stderr is not None
    stack.callback(server.stderr.close)
    line = server.stderr.readline()
    assert b"listening" in line, line


def _run(*command: str) -> None:
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=SECONDS, env=environment()
    )
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
