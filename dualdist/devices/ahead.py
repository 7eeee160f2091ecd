"""Collectives on devices that the host starts without waiting for the other ranks.

An agreement is a message between CPUs. The CPU waits for it, although it could run ahead of the device. The calls of
training repeat in each step. Therefore a call that the last step also made at this point needs no agreement. At the
end of each step the members compare the calls that they have made, so that a difference raises on all members.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from ..core.agreement.call import Call
from ..core.agreement.channel import Channel
from ..core.agreement.connections import Execute, Verdict
from ..core.agreement.guard import OutOfStepError, in_turn
from ..core.backends.base import Group
from ..errors import CollectiveMismatchError

_LONGEST = 10_000
"""How many calls of a step are remembered. More are made only where no step ends."""
_DESCRIPTION_BYTES = 32
"""The length of what a rank reports of its calls."""

T = TypeVar("T")


class Ahead:
    """The calls of one process set that run ahead. All members make them in the same order."""

    def __init__(
        self,
        run: Callable[[Call, Execute[Any]], Any],
        guard: Callable[[Call, Callable[[], Any]], Any],
        make_group: Callable[[], Group],
    ) -> None:
        """Prepare. Local.

        Args:
            run: runs a call with an agreement.
            guard: returns what the function returns, watched for a stall of the call.
            make_group: makes the group of the calls; collective over the members.
        """
        self._run, self._guard, self._make_group = run, guard, make_group
        # A group of its own: other threads use the groups of the channel.
        self._group: Group | None = None
        self.forget()

    def forget(self) -> None:
        """Start over after members have made different calls: those that only some have made would never end. Local."""
        self.abort()
        self._group = None
        self._last_end: Hashable = None
        """The call that ended the last step."""
        self._earlier: dict[Hashable, list[tuple[object, ...]]] = {}
        """The call that ended a step -> the calls of the last step after it."""
        self._made: list[tuple[object, ...]] = []
        """The calls since then."""
        self._count, self._digest = 0, b""

    def run(self, call: Call, execute: Execute[T]) -> T:
        """Run `call` as Channel.run does, but without an agreement if the last step made it at this point.

        `execute` must not wait for the data.
        """
        earlier = self._earlier.get(self._last_end, [])
        if earlier[self._count : self._count + 1] == [call.identity]:
            result = in_turn(call, self._execute, call, execute, Verdict(call))
        else:
            known = replace(call, arguments=(*call.arguments, ("calls_before", self._description())))
            result = self._run(known, lambda group, verdict: self._execute(call, execute, verdict))
        if self._count < _LONGEST:
            self._made.append(call.identity)
        self._count += 1
        self._digest = hashlib.blake2b(self._digest + repr(call.identity).encode(), digest_size=4).digest()
        return result

    def _execute(self, call: Call, execute: Execute[T], verdict: Verdict) -> T:
        if self._group is None:
            self._group = self._make_group()
        group = self._group
        return self._guard(call, lambda: execute(group, verdict))  # type: ignore[no-any-return]

    def _description(self) -> str:
        """Return the number and a digest of the calls of this step; "" if there are none."""
        return f"{self._count} calls ({self._digest.hex()})" if self._count else ""

    def end_step(self, call: Call, execute: Execute[T]) -> T:
        """Run `call` as Channel.run does, and compare the calls before it. The step ends.

        Raises CollectiveMismatchError if they differ, HorovodInternalError if a member has joined and missed them.
        """
        made = self._description()
        own = made.encode().ljust(_DESCRIPTION_BYTES)

        def compare_first(group: Group, verdict: Verdict) -> tuple[T | None, Sequence[bytes]]:
            if verdict.joined:
                if made:
                    raise OutOfStepError(f"ranks have joined, but the others made {made} of SyncBatchNorm")
                return execute(group, verdict), ()
            all_made = [payload[: len(own)] for payload in verdict.payloads] or group.allgather_bytes(own)
            others = tuple(payload[len(own) :] for payload in verdict.payloads)
            known = verdict._replace(payloads=others)
            return (None, all_made) if len(set(all_made)) > 1 else (execute(group, known), ())

        result, differing = self._run(replace(call, payload=own + call.payload), compare_first)
        if differing:
            self.forget()
            shown = [text.decode().strip() or "no calls" for text in differing]
            raise CollectiveMismatchError(
                f"The ranks ran different layers before {call.kind} at {call.where}: "
                f"{', '.join(f'{place}: {text}' for place, text in enumerate(shown))} (places in the process set). Run "
                "the same layers in the same order on all ranks."
            )
        if made:
            self._earlier[self._last_end] = self._made
            self._earlier.setdefault(call.identity, self._made)  # most programs have one kind of step
            self._last_end = call.identity
            self._made, self._count, self._digest = [], 0, b""
        return result  # type: ignore[no-any-return]

    def end_step_of_parts(
        self, call: Call, whole: Channel, channels: Mapping[int, Channel]
    ) -> CollectiveMismatchError | None:
        """Do `end_step` in the channels of some members of `whole` with calls that ran ahead; return their last error.

        For layers that share statistics within a host, say.
        """
        error, members = None, set(whole.group.ranks)
        used = [one for one in channels.values() if one is not whole and one.ahead and one.ahead._group]
        parts = [one for one in used if set(one.group.ranks) <= members]
        for part in sorted(parts, key=lambda one: one.group.ranks):  # in one order on all ranks
            try:
                part.ahead.end_step(call, lambda group, verdict: None)
            except CollectiveMismatchError as mismatch:
                error = mismatch
        return error

    def unfinished(self) -> object:
        """Return the last collective, None if it has ended. Local."""
        return None if self._group is None else self._group.unfinished()

    def abort(self) -> None:
        """End the collectives in progress without the other members. Local."""
        if self._group is not None:
            self._group.abort()

    def close(self) -> None:
        """Release the group. Local."""
        if self._group is not None:
            self._group.close()
