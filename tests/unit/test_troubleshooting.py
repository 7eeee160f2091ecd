"""docs/troubleshooting.md has an entry for every error and warning of the package, and none for others.

An entry begins with one or more texts in bold code, where `...` is any text. A few entries are for whole classes of
errors, which say themselves what the rule is and what was found (CLASSES). All others are for single texts.
"""

from __future__ import annotations

import functools
import math
import re
from pathlib import Path

import pytest

from ..helpers.error_texts import HOLE, PART, ErrorText, error_texts

PAGE = (Path(__file__).parents[2] / "docs" / "troubleshooting.md").read_text()
OURS, _, OTHERS = PAGE.partition("\n## Messages of other programs\n")

INTERNAL = (
    "another magic",
    "no ranks",
    "its name ends neither in .py nor in .ipynb",
    "it is no notebook of format 4",
    f"cell {HOLE}, line {HOLE}: {HOLE}",
)
"""Texts that no user sees alone, since the function that raises the error also handles it."""

CLASSES = {
    "`...` must ..., but ...": (("TypeError", "ValueError", "RuntimeError"), r"`.* must .+, but .+"),
    "`...` must ..., but .... ...": (("ConfigurationError",), rf"`.* must .+, but .+\. [A-Z{HOLE}].*"),
    "`--...` must ..., but ...": (
        ("ConfigurationError",),
        r"(?:`-[^`]*`|[A-Z]{4,}|A cell|A script|The cell \S+) (?:.* )?must .+, but .+",
    ),
    "dualdist ...: ...": (("warning",), f"dualdist {HOLE}: {HOLE}"),
    "... failed: ....": ((PART,), rf"{HOLE} failed: {HOLE}\."),
}
"""The entries for a class of errors -> the classes of Python, and the form of their texts."""

GAP = "..."
_FEWEST_WORDS = 6
"""How many words an entry must have in common with an error, if both have as many."""
_FEWEST_CHARACTERS = 10
"""How much of an entry's text must be literal, so that it does not stand for any error."""


def entries(page: str) -> list[str]:
    """Return the texts of all entries, each in one line."""
    return [" ".join(text.split()) for _, text in re.findall(r"\*\*(`+) ?(.+?) ?\1\*\*", page, re.DOTALL)]


def covers(entry: str, error: ErrorText) -> bool:
    if entry in CLASSES:
        kinds, form = CLASSES[entry]
        return error.kind in kinds and re.fullmatch(form, error.text, re.DOTALL) is not None
    ends = (GAP,) if error.kind == PART else ()
    first, second = words(entry), (*ends, *words(error.text), *ends)
    fewest = min(_FEWEST_WORDS, *(len(one) - one.count(GAP) for one in (first, second)))
    common = [word for word in first if word in second and word != GAP]
    return len(common) >= fewest and equal_words(first, second) >= fewest


@functools.cache
def words(text: str) -> tuple[str, ...]:
    """Return the words of a text. One with a hole is a GAP, which stands for any number of words."""
    return tuple(GAP if HOLE in word or GAP in word else word for word in text.split())


@functools.cache
def equal_words(first: tuple[str, ...], second: tuple[str, ...]) -> float:
    """Return how many words two texts have in common, at most; -inf unless their gaps can make them equal."""
    if not first or not second:
        return -math.inf if set(first + second) - {GAP} else 0
    if GAP in (first[0], second[0]):
        return max(equal_words(first[1:], second), equal_words(first, second[1:]))
    return 1 + equal_words(first[1:], second[1:]) if first[0] == second[0] else -math.inf


@pytest.fixture(scope="module")
def errors() -> list[ErrorText]:
    return [error for error in error_texts() if error.text not in INTERNAL]


def shown(error: ErrorText) -> str:
    return f"{error.place} {error.kind}: {error.text.replace(HOLE, '...')}"


def test_every_error_has_an_entry(errors: list[ErrorText]) -> None:
    assert len(errors) > 400
    found = entries(OURS)
    missing = [
        shown(error) for error in errors if error.kind != PART and not any(covers(entry, error) for entry in found)
    ]
    assert not missing, "\n".join(missing)


def test_every_entry_is_for_an_error(errors: list[ErrorText]) -> None:
    wrong = [entry for entry in entries(OURS) if not any(covers(entry, error) for error in errors)]
    assert not wrong, "\n".join(wrong)


def test_entries_differ_and_are_literal_texts() -> None:
    found = entries(OURS)
    assert len(entries(PAGE)) == len(set(entries(PAGE)))
    assert [e for e in found if e not in CLASSES and len(e.replace("...", "")) < _FEWEST_CHARACTERS] == []


def test_every_entry_has_sentences() -> None:
    paragraphs = [text for text in PAGE.split("\n\n") if text.startswith("**`")]
    assert len(paragraphs) > 100
    sentences = {text: text.rpartition("``**")[2] for text in paragraphs}
    assert [text for text, ends in sentences.items() if len(ends.split()) < 6 or "." not in ends] == []
