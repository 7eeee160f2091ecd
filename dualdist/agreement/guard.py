"""Runs the steps of a channel: watches each for a stall, and stops the channel when the backend fails."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from ..errors import HorovodInternalError, StallError
from .call import Call
from .connections import Connections
from .stall import StallWatch
from .verdict import shown_ranks

__all__ = ("Guard",)

T = TypeVar("T")


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
