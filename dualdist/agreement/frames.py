"""Messages as bytes on a connection: each with its length and with the number of members in a row that have sent it.

Members mostly send equal messages. Then what is sent for n members is as short as for one.
"""

from __future__ import annotations

import itertools
import struct

__all__ = ("GOODBYE", "SUCCESS", "framed", "take_one", "take_unread")

_HEADER = struct.Struct("<II")
"""The length of a message in bytes, and its number of members."""
GOODBYE = b"\xff\xff\xff\xff"
"""The last bytes of a process that leaves the world properly: the length of a message that is too long to arrive."""
SUCCESS = GOODBYE * 2
"""The same if no exception is why it leaves."""


def framed(messages: list[bytes]) -> bytes:
    """Return what is sent for `messages`, at least one. Equal ones that follow each other are sent as one."""
    first, count = messages[0], len(messages)
    if messages.count(first) == count:
        return _HEADER.pack(len(first), count) + first
    runs = [(message, len(list(equal))) for message, equal in itertools.groupby(messages)]
    return b"".join([_HEADER.pack(len(message), repeats) + message for message, repeats in runs])


def take_one(part: bytes, count: int) -> list[bytes]:
    """Return `count` messages if `part` is all of them and they are equal, else an empty list. The most common case."""
    if part.startswith(_HEADER.pack(max(0, len(part) - _HEADER.size), count)):
        return [part[_HEADER.size :]] * count
    return []


def take_unread(unread: bytearray, count: int) -> list[bytes]:
    """Remove the first `count` messages from `unread` and return them; an empty list while it does not hold them."""
    spans, end = [], 0
    while count > 0:
        start = end + _HEADER.size
        if len(unread) < start:
            return []
        length, repeats = _HEADER.unpack_from(unread, end)
        end = start + length
        count -= repeats
        spans.append((slice(start, end), repeats))
    if len(unread) < end:
        return []
    messages = [message for span, repeats in spans for message in [bytes(unread[span])] * repeats]
    del unread[:end]
    return messages
