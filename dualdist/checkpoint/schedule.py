"""In which steps a manager saves, and in which the ranks talk about it."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ("Schedule",)


@dataclass(frozen=True)
class Schedule:
    """When it is time; equal on all ranks."""

    every_steps: int | None
    every_seconds: float | None
    agree_every: int
    expects_news: bool
    """Whether a rank may know something that the others must be told: a signal, or an error beside the training."""

    def check(self) -> None:
        """Raise ValueError unless every number is positive."""
        for name in ("every_steps", "every_seconds", "agree_every"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"`{name}` must be greater than 0, but is {value} instead.")

    def is_due(self, step: int) -> bool:
        """Return whether to save after `step`."""
        return self.every_steps is not None and step % self.every_steps == 0

    def is_late(self, seconds: float) -> bool:
        """Return whether to save `seconds` after the last save."""
        return self.every_seconds is not None and seconds >= self.every_seconds

    def agrees(self, step: int) -> bool:
        """Return whether the ranks tell each other what they know after `step`."""
        return (self.expects_news or self.every_seconds is not None) and step % self.agree_every == 0
