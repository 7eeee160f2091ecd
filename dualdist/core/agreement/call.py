"""A collective as one rank calls it, and the kinds of collectives."""

from __future__ import annotations

import functools
import os
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import FrameType
from typing import Any

from ..backends.base import Group

# The line of the user's code that makes a call.

_OURS = str(Path(__file__).resolve().parents[2]) + os.sep
_TORCH = f"{os.sep}site-packages{os.sep}torch{os.sep}"

_remembered: list[tuple[str, int]] = []
"""At most one (file, line)."""


def call_site() -> tuple[str, int]:
    """Return (file, line) of the innermost frame outside dualdist and torch.

    In a thread without one, return what `remember_call_site` has found: autograd runs the hooks and the backward
    functions of a GPU in threads of its own (torch/csrc/autograd/engine.cpp, Engine::start_device_threads).
    """
    frame = _user_frame()
    if _remembered and is_internal(frame.f_code.co_filename):
        return _remembered[0]
    return frame.f_code.co_filename, frame.f_lineno


def remember_call_site() -> None:
    """Remember the user's line, which is near the next call of `backward`."""
    frame = _user_frame()
    _remembered[:] = [(frame.f_code.co_filename, frame.f_lineno)]


def warn_deprecated(message: str) -> None:
    """Issue a DeprecationWarning for the user's line (see `call_site`), in the user's module.

    Python shows a DeprecationWarning by default only if it belongs to `__main__`. `warnings.warn` cannot do this: it
    needs the number of frames between this function and the user's line, which differs between the public functions.
    """
    frame = _user_frame()
    place = frame.f_code.co_filename, frame.f_lineno, frame.f_globals.get("__name__")
    registry = frame.f_globals.setdefault("__warningregistry__", {})
    warnings.warn_explicit(message, DeprecationWarning, *place, registry)


def _user_frame() -> FrameType:
    frame = sys._getframe(1)
    while is_internal(frame.f_code.co_filename) and frame.f_back is not None:
        frame = frame.f_back
    return frame


@functools.cache
def is_internal(file: str) -> bool:
    """Return whether `file` belongs to dualdist or torch, or has no source."""
    is_library = _TORCH in file or file.endswith(f"{os.sep}contextlib.py") or file.startswith("<")
    return is_library or os.path.realpath(file).startswith(_OURS)  # `dualdist parity` runs through a link


# The kinds of calls. Who makes a call defines its kind, a constant.


class Data(Enum):
    """When the data of a call is sent."""

    NONE = "none"
    """Never: it moves no tensors. After the agreement the members may still connect, as in add_process_set."""
    AFTER = "after"
    """After the agreement."""
    BEFORE = "before"
    """Before the agreement, over `Channel.gradients`: buckets of gradients are under way when the members agree. So a
    member that raises because the calls differ must receive them first."""


def no_data(call: Call, group: Group, verdict: Any) -> None:
    """Do nothing: a kind of calls with this `stand_in` needs only the agreement."""


@dataclass(frozen=True)
class Kind:
    """One kind of call."""

    name: str
    """Its name in error messages."""
    event: str
    """Its name on the timeline, as Horovod writes it (horovod/common/timeline.cc)."""
    data: Data = Data.AFTER
    stand_in: Callable[[Call, Group, Any], None] | None = None
    """What a rank that has called `join` runs while the others run a call, with the Verdict on which they agreed. A
    function of a module, since calls are pickled. None: such a rank cannot take part, so that the call raises
    HorovodInternalError on the others."""
    in_step: bool = False
    """Whether training steps make it, always synchronously. Calls that run ahead of a device are predicted from the
    last step, until members make different calls of such a kind (dualdist/devices/ahead.py)."""

    def __str__(self) -> str:
        return self.name


LONGEST_TEXT = 400
"""How many characters a message shows of a call or an exception."""


@dataclass(frozen=True)
class Call:
    """One collective as this rank called it."""

    kind: Kind
    arguments: tuple[tuple[str, Any], ...] = ()
    """(name, value) pairs that must be equal on all members; values are built-in types."""
    name: str | None = None
    site: tuple[str, int] = ("?", 0)
    """(file, line) of the user's code; shown in errors, never compared."""
    count: int = 0
    """A number of this rank that all members receive, such as its rows in an allgather; it may differ between them."""
    payload: bytes = b""
    """Small data sent in the same message as the agreement: of all members, or of the root of a broadcast.

    Of a kind with `Data.AFTER`, it is all data: nothing is sent after the agreement. Which members send some, and its
    length, which `payload_capacity` limits, follow from `arguments`. Of other kinds, any member may send some, of any
    length. None is received if the members exchange all their pending calls: a call then runs as without a payload.
    """

    @property
    def identity(self) -> tuple[object, ...]:
        """Return what must be equal on all members."""
        return self.kind.name, self.name, self.arguments

    @property
    def key(self) -> tuple[str, str | None]:
        """Return what matches this call with those of the other members: kind and name."""
        return self.kind.name, self.name

    def stand_in(self, group: Group, verdict: Any) -> None:
        """Take part on a rank that has called `join`."""
        assert self.kind.stand_in is not None
        self.kind.stand_in(self, group, verdict)

    def __str__(self) -> str:
        shown = [f"{key}={value}" for key, value in self.arguments]
        if self.name is not None:
            shown.append(f"name={self.name!r}")
        return f"{self.kind}({', '.join(shown)})"

    @property
    def brief(self) -> str:
        """Return the call and its site for a message, without most of a long list such as a model's parameters."""
        text = str(self)
        return f"{text if len(text) <= LONGEST_TEXT else text[:LONGEST_TEXT] + '...)'} at {self.where}"

    @property
    def where(self) -> str:
        """Return the call site as 'file:line'."""
        return f"{self.site[0]}:{self.site[1]}"


@dataclass(slots=True, eq=False)
class Record:
    """A call in the list of this rank's last ones. Times are in nanoseconds since the epoch; 0: not yet."""

    call: Call
    called: int
    channel: str = ""
    number: int = 0
    """How many calls of the channel the members had agreed on with this one: the same on all of them."""
    agreed: int = 0
    ended: int = 0
