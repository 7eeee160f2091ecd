"""After which steps a manager saves, and after which the ranks exchange signals and errors."""

from __future__ import annotations

from dataclasses import dataclass

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
        """Raise ValueError if a number is not positive."""
        for name in ("every_steps", "every_seconds", "agree_every"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"`{name}` must be greater than 0, but is {value} instead.")

    def is_due(self, step: int) -> bool:
        """Return whether to save after `step`."""
        return self.every_steps is not None and step % self.every_steps == 0

    def is_late(self, seconds: float) -> bool:
        """Return whether to save when the last save was `seconds` ago."""
        return self.every_seconds is not None and seconds >= self.every_seconds

    def agrees(self, step: int) -> bool:
        """Return whether the ranks exchange events after `step`."""
        return (self.expects_events or self.every_seconds is not None) and step % self.agree_every == 0
