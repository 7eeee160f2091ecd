"""After which steps a manager saves, and after which the ranks exchange signals and errors."""

from __future__ import annotations

from dataclasses import dataclass

from ..checks import integer, number

__all__ = ("Schedule",)


@dataclass(frozen=True)
class Schedule:
    """The rules that decide when to save and when to exchange; equal on all ranks."""

    every_steps: int | None
    every_seconds: float | None
    agree_every: int
    expects_events: bool
    """Whether one rank may know of an event that the others do not see: a signal, or the error of a background save."""

    def check(self) -> None:
        """Raise ValueError or TypeError if a number is not positive."""
        integer("agree_every", self.agree_every, least=1)
        if self.every_steps is not None:
            integer("every_steps", self.every_steps, least=1)
        if self.every_seconds is not None:
            number("every_seconds", self.every_seconds, above=0)

    def is_due(self, step: int) -> bool:
        """Return whether to save after `step`."""
        return self.every_steps is not None and step % self.every_steps == 0

    def is_late(self, seconds: float) -> bool:
        """Return whether to save when the last save was `seconds` ago."""
        return self.every_seconds is not None and seconds >= self.every_seconds

    def agrees(self, step: int) -> bool:
        """Return whether the ranks exchange events after `step`."""
        return (self.expects_events or self.every_seconds is not None) and step % self.agree_every == 0
