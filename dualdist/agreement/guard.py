"""Runs the steps of a channel: watches each for a stall, and stops the channel when the backend fails."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import ParamSpec, TypeVar

from ..errors import HorovodInternalError, StallError
from .call import Call
from .connections import Connections
from .verdict import shown_ranks
from .watch import StallWatch

# One call at a time in a thread, also when a signal handler interrupts the call.
#
# A handler runs in the main thread, inside the call that it interrupts. A second call there would wait for the first
# one, and the first one for the handler.

T = TypeVar("T")
P = ParamSpec("P")


class _Turn(threading.local):
    call: Call | None = None


_turn = _Turn()
"""The call that this thread is making."""


def in_turn(call: Call, step: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Return `step(*args, **kwargs)`, which makes `call`. Raises RuntimeError if this thread is in another call."""
    interrupted = _turn.call
    if interrupted is not None:
        raise RuntimeError(
            f"{call.kind} must not be called in a signal handler or destructor that interrupts {interrupted} at "
            f"{interrupted.where}: each would wait for the other. Let the handler set a flag, and check it after each "
            "step. CheckpointManager(signals=) saves a checkpoint and ends the run in this way."
        )
    try:
        _turn.call = call  # inside `try`: a handler that raises may run before any instruction
        return step(*args, **kwargs)
    finally:
        _turn.call = None


class Guard:
    """Guards the steps of one channel. Members must run the same steps under the same name."""

    def __init__(
        self,
        watch: StallWatch,
        connections: Connections,
        pending: Callable[[], Iterable[Call]],
        abort: Callable[[], None],
    ) -> None:
        """abort: ends the collectives in progress after a failure, once the other members can notice it."""
        self._abort = abort
        self._watch = watch
        self._connections = connections
        self._pending = pending
        """Returns the pending calls of the channel."""
        self._broken: str | None = None
        """Why no call can run any more; None while calls can run."""

    def run(self, name: str, call: Call, step: Callable[[], T]) -> T:
        """Return `step()`, watched for a stall. After a failure of the backend, every later call raises.

        name: under which the watch knows the channel.
        """
        if self._broken is not None:
            raise HorovodInternalError(
                f"{call.kind} cannot run: {self._broken} Call shutdown() and init() to continue."
            )
        number = self._watch.begin(name, call, self._pending)
        try:
            return step()
        except HorovodInternalError as error:
            if self._broken is not None:  # a step inside this one has failed
                raise
            raise self._failure(call, name, number, error) from error.__cause__
        except BaseException as error:  # such as KeyboardInterrupt: it is unknown how far this rank got
            self._broken = f"{call.brief} was interrupted: {error!r}."
            self._watch.interrupt(name, repr(error))
            self._connections.close()
            self._abort()
            raise
        finally:
            self._watch.end(name)

    def _failure(
        self, call: Call, name: str, number: int, error: HorovodInternalError
    ) -> HorovodInternalError:
        """Let every later call raise, and return the error of this one, which says what the other ranks are doing."""
        found, succeeded = None, self._connections.peers_that_succeeded()
        if isinstance(error, StallError) or self._watch.is_crossed(name):
            survey = self._watch.survey(name, number, call.key)
            self._watch.give_notice(name, survey)
            found = self._watch.partners_notice(name) or str(survey)
        self._connections.close()  # so that no member waits for this rank
        self._abort()
        found = found or self._watch.notice(name)
        if found is not None:
            stalled = f"{call.brief} stalled; {found}"
            self._broken = stalled.splitlines()[0]
            return StallError(stalled)
        failed = self._broken = f"{call.brief} failed: {str(error).rstrip('.')}."
        text = f"{failed} Look for the first error of another rank, or for a failure of the network"
        survey = self._watch.survey(name, number, call.key, has_failed=True)
        if not survey.missing:
            return HorovodInternalError(f"{text}.")
        if set(survey.missing) <= set(succeeded):
            text = (
                f"{failed} {shown_ranks(survey.missing).capitalize()} ended or called shutdown(), without an exception "
                "and without this call. Let all ranks make the same calls. If one had fewer batches than the others, "
                "give all the same number, or call join() at the end"
            )
        self._broken = f"{failed.rstrip('.')}; {str(survey).splitlines()[0]}"
        return HorovodInternalError(f"{text}; {survey}")
