"""Host lists, and the host of each rank.

The formats are those of horovodrun, `-H host1:4,host2:4` and lines of `host slots=4`, and of the host files of Open MPI
and MPICH. Ranks fill the hosts in the given order, as in horovod/runner/common/util/hosts.py:get_host_assignments.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..errors import ConfigurationError

__all__ = ("Host", "Slot", "assign", "merged", "parse_host", "parse_hostfile", "parse_hosts")

_NAME = r"(?P<name>(?:[A-Za-z0-9_.][\w.-]*@)?(?:[A-Za-z0-9_][\w.-]*|\[[0-9A-Fa-f:.%\w]+\]))"
"""A host name or address, IPv6 in brackets, with an optional USER@ before it. It cannot be an option of ssh."""
_ITEM = re.compile(rf"{_NAME}(?::(?P<slots>\d+))?", re.ASCII)
_WORD = re.compile(r"(?P<key>[a-z_-]+)\s*=\s*(?P<value>\d+)")


@dataclass(frozen=True)
class Host:
    """A host and the number of processes that may run on it."""

    name: str
    slots: int


@dataclass(frozen=True)
class Slot:
    """Where one rank runs."""

    rank: int
    host: str
    local_rank: int
    local_size: int


def parse_hosts(text: str) -> list[Host]:
    """Return the hosts of `-H host1:4,host2:4`; a host without a number has one slot, as in Open MPI.

    Raises ConfigurationError for any other form.
    """
    return merged(parse_host(item.strip(), "-H") for item in text.split(","))


def parse_hostfile(text: str, path: str) -> list[Host]:
    """Return the hosts of a host file: `host slots=4`, `host:4` or `host` per line; `#` starts a comment.

    max_slots and max-slots are ignored: a host never runs more processes than its slots.
    Raises ConfigurationError, with the number of the line, for any other form, and when there is no host.
    """
    hosts = []
    for number, line in enumerate(text.splitlines(), 1):
        content = line.partition("#")[0].strip()
        if content:
            hosts.append(_parse_line(content, f"{path}:{number}"))
    if not hosts:
        raise ConfigurationError(
            f"The host file {path} must name a host, but names none. Write `host slots=4` lines."
        )
    return merged(hosts)


def assign(hosts: Sequence[Host], size: int | None) -> list[Slot]:
    """Return the slots of ranks 0 to `size` - 1, or of all slots, in the order of the hosts.

    Raises ConfigurationError when there are fewer slots than processes, or no processes.
    """
    total = sum(host.slots for host in hosts)
    if size is not None and size < 1:
        raise ConfigurationError(f"`-np` must be at least 1, but is {size} instead.")
    size = total if size is None else size
    if not 1 <= size <= total:
        listed = ", ".join(f"{host.name}:{host.slots}" for host in hosts)
        raise ConfigurationError(
            f"`-np` must be between 1 and the {total} slots of {listed}, but is {size} instead. "
            "Give the hosts more slots, or start fewer processes."
        )
    slots: list[Slot] = []
    for host in hosts:
        count = min(host.slots, size - len(slots))
        slots += [Slot(len(slots) + local, host.name, local, count) for local in range(count)]
    return slots


def parse_host(item: str, where: str) -> Host:
    """Return the host of `host1:4` or `host1`. Raises ConfigurationError, which names `where`, for any other form."""
    found = _ITEM.fullmatch(item)
    if found is None:
        raise ConfigurationError(
            f"`{where}` must hold host names with numbers of slots, such as node1:4,node2:4, but has {item!r} instead. "
            "Names are letters, digits, '.', '-' and '_'; an IPv6 address is in brackets."
        )
    return Host(found["name"], int(found["slots"] or 1))


def _parse_line(content: str, where: str) -> Host:
    name, _, rest = content.partition(" ")
    host = parse_host(name.strip(), where)
    words = {found["key"]: int(found["value"]) for found in _WORD.finditer(rest)}
    unknown = _WORD.sub("", rest).strip() or ", ".join(words.keys() - {"slots", "max_slots", "max-slots"})
    if unknown:
        raise ConfigurationError(f"`{where}` must be `host slots=4`, but has {unknown!r} instead.")
    return Host(host.name, words.get("slots", host.slots))


def merged(hosts: Iterable[Host]) -> list[Host]:
    """Return each host once, with the sum of its slots."""
    slots: dict[str, int] = {}
    for host in hosts:
        slots[host.name] = slots.get(host.name, 0) + host.slots
    return [Host(name, count) for name, count in slots.items()]
