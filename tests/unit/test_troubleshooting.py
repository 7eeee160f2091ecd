"""docs/troubleshooting.md has an entry for every error and warning of the package, and none for others.

An entry begins with one or more texts in bold code, where `...` is any text. A few entries are for whole classes of
errors, which say themselves what the rule is and what was found (CLASSES). All others are for single texts.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ..helpers.error_texts import HOLE, ErrorText, error_texts

PAGE = (Path(__file__).parents[2] / "docs" / "troubleshooting.md").read_text()
OURS, _, OTHERS = PAGE.partition("\n## Messages of other programs\n")

BUILDERS = (
    "calls_differ",
    "nothing_matches",
    "calls_failed",
    "not_arrived",
    "waited",
    "silent_hosts",
    "text_of",
)
"""Functions that return the text of an error, which is then sent to another rank or kept until it is raised."""

PASSED_ON = """
    agreement/call.py: message
    agreement/channel.py: verdict.error
    agreement/connections.py: text
    agreement/connections.py: self._store.get(f'{self._key}/failure').decode()
    agreement/connections.py: f'{host}:{port}: {error}'
    agreement/guard.py: '%s %s'
    agreement/guard.py: self._broken
    backends/horovod/group.py: str(error)
    backends/mpi/work.py: self._problem
    backends/mpi/work.py: problem
    backends/torch_interface.py: text
    checkpoint/catalog.py: self._rejected[path]
    checkpoint/manager.py: '%s'
    checkpoint/manager.py: problem
    checkpoint/sharded.py: text
    checkpoint/transfer.py: problem
    checks.py: str(error)
    cli/parity.py: '\\n  '.join([error, *_where(Path(folder), cell.size)])
    meeting/addresses.py: problems[0]
    meeting/export.py: problems[0]
    meeting/member.py: error
    meeting/server.py: getattr(error, 'strerror', str(error))
    meeting/server.py: '; '.join(problems) or 'its host has no address that others can reach'
    processes/job.py: None
    processes/job.py: silent
    processes/output.py: _NAMES[stream]
    training/parallel_arguments.py: text
    training/state_names.py: name
    world/process_sets.py: str(error)
"""
"""FILE: EXPRESSION of errors whose text is that of another error, of another program, or of one of BUILDERS."""

INTERNAL = ("another magic", "no ranks")
"""Texts that no user sees alone, since the function that raises the error also handles it."""

CLASSES = {
    "`...` must ..., but ...": (("TypeError", "ValueError", "RuntimeError"), r"`.* must .+, but .+"),
    "`...` must ..., but .... ...": (("ConfigurationError",), r"`.* must .+, but .+\. [A-Z].+"),
    "`--...` must ..., but ...": (
        ("ConfigurationError",),
        r"(?:`-[^`]*`|[A-Z]{4,}|A cell|A script|The cell \S+) (?:.* )?must .+, but .+",
    ),
    "dualdist ...: ...": (("warning",), f"dualdist {HOLE}: {HOLE}"),
    "... failed: ....": (("HorovodInternalError",), rf"{HOLE} failed: {HOLE}\."),
}
"""The entries for a class of errors -> the classes of Python, and the form of their texts."""

_ANY_PART = rf"(?:[^{HOLE}]{{0,40}}{HOLE})*[^{HOLE}]{{0,40}}?"
_FEWEST_CHARACTERS = 10
"""How much of an entry's text must be literal, so that it does not stand for any error."""


def entries(page: str) -> list[str]:
    """Return the texts of all entries, each in one line."""
    return [" ".join(text.split()) for _, text in re.findall(r"\*\*(`+) ?(.+?) ?\1\*\*", page, re.DOTALL)]


def covers(entry: str, error: ErrorText) -> bool:
    if entry in CLASSES:
        kinds, form = CLASSES[entry]
        return error.kind in kinds and re.fullmatch(form, error.text, re.DOTALL) is not None
    return re.fullmatch(_pattern(entry), error.text, re.DOTALL) is not None


def _pattern(entry: str) -> str:
    """Return the pattern of the texts of an entry: inside of it, `...` is for holes and a few words."""
    *parts, last = [re.escape(part.strip()) for part in entry.split("...")]
    return _ANY_PART.join([*parts, last]) if last else _ANY_PART.join(parts) + ".*"


@pytest.fixture(scope="module")
def errors() -> list[ErrorText]:
    return error_texts(BUILDERS)


def shown(error: ErrorText) -> str:
    return f"{error.place} {error.kind}: {error.text.replace(HOLE, '...')}"


def has_text(error: ErrorText) -> bool:
    return re.search("[a-z]{2}", error.text) is not None and error.text not in INTERNAL


def test_every_error_has_an_entry(errors: list[ErrorText]) -> None:
    texts = [error for error in errors if has_text(error)]
    assert len(texts) > 400
    found = entries(OURS)
    missing = [shown(error) for error in texts if not any(covers(entry, error) for entry in found)]
    assert not missing, "\n".join(missing)


def test_every_entry_is_for_an_error(errors: list[ErrorText]) -> None:
    wrong = [entry for entry in entries(OURS) if not any(covers(entry, error) for error in errors)]
    assert not wrong, "\n".join(wrong)


def test_every_text_that_is_made_elsewhere_is_known(errors: list[ErrorText]) -> None:
    passed_on = {
        f"{error.place.partition(':')[0]}: {error.source}"
        for error in errors
        if not re.search("[a-z]{2}", error.text)
    }
    assert sorted(passed_on) == sorted(line.strip() for line in PASSED_ON.strip().splitlines())


def test_entries_differ_and_are_literal_texts() -> None:
    found = entries(OURS)
    assert len(entries(PAGE)) == len(set(entries(PAGE)))
    assert [e for e in found if e not in CLASSES and len(e.replace("...", "")) < _FEWEST_CHARACTERS] == []


def test_every_entry_has_sentences() -> None:
    paragraphs = [text for text in PAGE.split("\n\n") if text.startswith("**`")]
    assert len(paragraphs) > 100
    sentences = {text: text.rpartition("``**")[2] for text in paragraphs}
    assert [text for text, ends in sentences.items() if len(ends.split()) < 6 or "." not in ends] == []
