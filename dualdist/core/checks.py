"""Checks of arguments. Each one returns the value, or raises an error that names the parameter.

Messages have one form: "`x` must be <rule>, but is {x} instead.", then what to do. A wrong type is a TypeError, a wrong
value a ValueError. Truth values are no numbers, except for `flag`.
"""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, cast

from ..errors import ConfigurationError

T = TypeVar("T")
Bound = float | None

_LONGEST = 100
"""How many characters of a value a message shows."""


def shown(value: Any) -> str:
    """Return `value` as a message shows it: itself if it is plain, else its type."""
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        text = repr(value)
        return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
    kind = type(value)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def shown_ranks(ranks: Sequence[int]) -> str:
    """Return "rank 0" or "ranks 0, 1"."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def text_of(error: BaseException) -> str:
    """Return the text of `error`, whose class may be the user's."""
    try:
        return str(error)
    except Exception as another:
        return f"a text that cannot be shown, since its class raises {type(another).__name__}"


def wrong(name: str, rule: str, value: Any, fix: str = "", error: type[Exception] = ValueError) -> Exception:
    """Return the error for the parameter `name`, whose `value` breaks `rule`. fix: what to do."""
    return error(f"`{name}` must be {rule}, but is {shown(value)} instead.{' ' * bool(fix)}{fix}")


def converted(
    name: str,
    value: Any,
    convert: Callable[[Any], T],
    rule: str,
    fix: str = "",
    without: type | UnionType | tuple[()] = (),
) -> T:
    """Return `convert(value)`. Raises TypeError if that fails, or if `value` is of a class in `without`."""
    if isinstance(value, without):
        raise wrong(name, rule, value, fix, TypeError)
    try:
        return convert(value)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:  # RuntimeError: torch
        raise wrong(name, rule, value, fix, TypeError) from error


def integer(
    name: str, value: Any, least: int | None = None, below: int | None = None, fix: str = "Pass an int."
) -> int:
    """Return `value` as an int of at least `least` and below `below`. A tensor with one integer is an integer."""
    if type(value) is not int:
        rule = _range("a whole number", least, below)
        value = converted(name, value, operator.index, rule, fix, without=bool)
    if (least is not None and value < least) or (below is not None and value >= below):
        raise wrong(name, _range("a whole number", least, below), value, fix)
    return int(value)


def number(
    name: str, value: Any, least: Bound = None, most: Bound = None, above: Bound = None, fix: str = "Pass a float."
) -> float:
    """Return `value` as a finite float within the bounds. A tensor with one number is a number."""
    if type(value) is float and math.isfinite(value) and least is most is above is None:
        return value
    rule = _range("a finite number", least, None, most, above)
    result = converted(name, value, float, rule, fix, without=bool | str | bytes)
    is_low = (least is not None and result < least) or (above is not None and result <= above)
    if is_low or (most is not None and result > most) or not math.isfinite(result):
        raise wrong(name, rule, value, fix)
    return result


def _range(kind: str, least: Bound = None, below: Bound = None, most: Bound = None, above: Bound = None) -> str:
    bounds = {"of at least": least, "below": below, "of at most": most, "above": above}
    limits = [f"{words} {_power(bound)}" for words, bound in bounds.items() if bound is not None]
    return " ".join([kind, " and ".join(limits)]).strip()


def _power(bound: float) -> str:
    """Return a large power of two as such, any other number as it is."""
    is_power = isinstance(bound, int) and bound > 1 << 20 and bound.bit_count() == 1
    return f"2**{int(bound).bit_length() - 1}" if is_power else f"{bound}"


def flag(name: str, value: Any) -> bool:
    """Return `value`, which must be True or False, as a bool. 0 and 1 count as such, and so do NumPy's."""
    is_flag = isinstance(value, int) and value in (0, 1)
    if is_flag or (type(value).__module__ == "numpy" and type(value).__name__ in ("bool", "bool_")):
        return bool(value)
    raise wrong(name, "True or False", value, error=TypeError)


def text(name: str, value: Any, fix: str = "Pass a string.") -> str:
    """Return `value`, which must be a string."""
    return cast(str, instance(name, value, str, "a string", fix))


def path(name: str, value: Any) -> Path:
    """Return `value`, a string or another path of text, as a Path."""
    if value == "" or (isinstance(value, str) and "\0" in value):
        raise wrong(name, "a path", value, "Pass a string or a Path.")
    return converted(name, value, Path, "a path", "Pass a string or a Path.")


def instance(name: str, value: Any, kind: type | tuple[type, ...], rule: str, fix: str = "") -> Any:
    """Return `value`, which must be of class `kind`. rule: the class as the message shows it."""
    if isinstance(value, kind):
        return value
    raise wrong(name, rule, value, fix, TypeError)


def is_dtensor(tensor: Any) -> bool:
    """Return whether `tensor` is one of torch.distributed.tensor, which is not imported for this."""
    return any(kind.__name__ == "DTensor" for kind in type(tensor).__mro__)


def function(name: str, value: Any, fix: str = "Pass a function.") -> Callable[..., Any]:
    """Return `value`, which must be callable."""
    if callable(value):
        return cast("Callable[..., Any]", value)
    raise wrong(name, "a function", value, fix, TypeError)


def items(name: str, value: Any, rule: str, fix: str = "") -> list[Any]:
    """Return the items of `value`, which must be iterable, but no string and no dictionary. rule: for the message."""
    try:
        if isinstance(value, str | bytes | Mapping):
            raise TypeError
        return list(value)
    except TypeError:
        raise wrong(name, rule, value, fix, TypeError) from None


def mapping(name: str, value: Any, *keys: str, fix: str = "") -> Mapping[Any, Any]:
    """Return `value`, which must be a dictionary with `keys`."""
    rule = f"a dictionary with {', '.join(map(repr, keys))}" if keys else "a dictionary"
    given: Mapping[Any, Any] = instance(name, value, Mapping, rule, fix)
    missing = [key for key in keys if key not in given]
    if missing:
        raise ValueError(f"`{name}` must be {rule}, but has no {', '.join(map(repr, missing))}.{' ' * bool(fix)}{fix}")
    return given


@contextlib.contextmanager
def configuration() -> Iterator[None]:
    """Raise the errors of the checks in the body as ConfigurationError."""
    try:
        yield
    except ConfigurationError:
        raise
    except (TypeError, ValueError) as error:
        raise ConfigurationError(str(error)) from None


def add_note(error: Exception, note: str) -> None:
    """Let tracebacks show `note` after the message. On Python 3.10, which has no notes, the message ends with it."""
    if note and hasattr(error, "add_note"):
        error.add_note(note)
    elif note:
        error.args = (f"{error}\n{note}",)
