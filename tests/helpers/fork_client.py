"""Runs a script or module in a fork of the server in fork_server.py, and behaves as that fork does.

    python -IS fork_client.py SOCKET SCRIPT|-m MODULE [ARGUMENT ...]

The fork gets the arguments, environment, working directory, open files and namespaces of this process. Signals are
passed to it, its end is the end of this process, and it dies if this process is killed. To start quickly, this file
imports little.
"""

import marshal
import os
import signal
import socket
import sys

PASSED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGABRT)
NAMESPACES = ("net", "uts", "mnt")


def number_from(server: socket.socket) -> int:
    data = server.recv(4)
    if not data:
        os._exit(1)  # the server has ended
    return int.from_bytes(data, "big", signed=True)


def main() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, PASSED)
    files = [int(name) for name in os.listdir("/proc/self/fd")]
    files = [file for file in files if os.path.exists(f"/proc/self/fd/{file}")]  # one was of listdir itself
    namespaces = [os.open(f"/proc/self/ns/{name}", os.O_RDONLY) for name in NAMESPACES]
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    server.connect(sys.argv[1])
    message = marshal.dumps((sys.argv[2:], dict(os.environb), os.getcwd(), os.getppid(), files))
    socket.send_fds(server, [len(message).to_bytes(4, "big")], [*files, *namespaces])
    server.sendall(message)
    child = number_from(server)
    with open("/proc/self/comm", "w") as name:
        name.write(f"fork {child}")  # for `fork_of` in forks.py
    for number in PASSED:
        signal.signal(number, lambda number, _: os.kill(child, number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED)
    end = number_from(server)
    if end < 0:
        if -end in PASSED:
            signal.signal(-end, signal.SIG_DFL)
        os.kill(os.getpid(), -end)
    os._exit(end)


main()
