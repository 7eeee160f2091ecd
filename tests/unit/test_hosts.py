"""Host lists, host files, and the host of each rank."""

from __future__ import annotations

import socket

import pytest

from dualdist.errors import ConfigurationError
from dualdist.processes.hosts import Host, assign, is_local, parse_hostfile, parse_hosts, ssh_command
from dualdist.processes.job import RunOptions

from ..helpers.requirements import need_programs


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("node1:4", [("node1", 4)]),
        ("node1:4, node-2.example:2", [("node1", 4), ("node-2.example", 2)]),
        ("10.0.0.1:1,[fe80::1]:2", [("10.0.0.1", 1), ("[fe80::1]", 2)]),
        ("node1,me@node2:3", [("node1", 1), ("me@node2", 3)]),
        ("node1:1,node2:1,node1:2", [("node1", 3), ("node2", 1)]),
    ],
)
def test_a_host_list_is_names_and_slots(text: str, hosts: list[tuple[str, int]]) -> None:
    assert parse_hosts(text) == [Host(*host) for host in hosts]


@pytest.mark.parametrize(
    "text",
    [
        *("", "node1:", "node1:two", "node1:-1", "node1:9999999999", "n:\u0663", ":4"),
        *("a b:1", "-oProxyCommand=x:1", "a;b:1", "$(x):1", "a\nb"),
    ],
)
def test_an_error_quotes_what_is_not_a_host_name(text: str) -> None:
    with pytest.raises(ConfigurationError, match="-H") as caught:
        parse_hosts(f"good:1,{text}")
    assert repr(text) in str(caught.value)


def test_host_files_of_horovodrun_open_mpi_and_mpich_are_read() -> None:
    text = "# all nodes\nnode1 slots=4\n\nnode2 slots = 2 max_slots=8  # the small one\nnode3:3\r\n  node4\n"
    found = parse_hostfile(f"{text}node5\tslots=2\t max_slots=2\n", "hosts")
    assert found == [Host(f"node{number}", slots) for number, slots in enumerate((4, 2, 3, 1, 2), 1)]


@pytest.mark.parametrize(
    "line", ["node2 slots=x", "node2 4", "node2 slots=4 color=3", "no/de slots=1", "a slots=\u0663"]
)
def test_an_error_names_the_line_of_a_host_file(line: str) -> None:
    with pytest.raises(ConfigurationError, match="hosts:2"):
        parse_hostfile(f"node1 slots=1\n{line}\n", "hosts")
    with pytest.raises(ConfigurationError, match="names none"):
        parse_hostfile("# nothing\n", "hosts")


def test_hosts_are_filled_in_order_and_without_a_number_of_processes_all_slots_are_used() -> None:
    hosts = [Host("a", 2), Host("b", 2), Host("c", 4)]
    assert assign(hosts, 5) == ["a", "a", "b", "b", "c"]
    assert assign(hosts, 1) == ["a"]
    assert assign([Host("a", 1), Host("b", 0), Host("c", 2)], None) == ["a", "c", "c"]


@pytest.mark.parametrize(
    ("size", "slots", "words"),
    [
        (0, 2, "at least 1, but is 0"),
        (-1, 2, "at least 1, but is -1"),
        (4, 2, "the 3 slots of a:2, b:1, but is 4"),
        (None, 99_999_999_998, "less than 65536, but is 99999999999 instead"),
    ],
)
def test_too_many_and_too_few_processes_are_errors(size: int | None, slots: int, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        assign([Host("a", slots), Host("b", 1)], size)


def test_names_and_addresses_of_this_machine_are_local() -> None:
    for name in ("localhost", "127.0.0.1", "127.0.0.7", "[::1]", socket.gethostname()):
        assert is_local(name)
    assert not is_local("192.0.2.1")  # an address of no machine: RFC 5737


def test_the_ssh_command_is_quoted_for_the_remote_shell() -> None:
    need_programs("ssh")
    made = ssh_command(
        "[fe80::1]",
        ["/a b/python", "-c", "print('$x')"],
        {"DUALDIST_SSH": "ssh -F 'my file'"},
        RunOptions([], [], ssh_port=22, ssh_identity="key", start_timeout=8).ssh_options,
    )
    assert made[:3] == ["ssh", "-F", "my file"]
    assert made[-3:] == ["--", "fe80::1", """exec '/a b/python' -c 'print('"'"'$x'"'"')'"""]
    assert ("-p", "22", "-i", "key") == tuple(made[-7:-3])
    assert "BatchMode=yes" in made and "ConnectTimeout=7" in made
