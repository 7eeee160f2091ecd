"""The texts of the errors and warnings of the package, read from its sources.

These are the strings in the calls that make an error, a warning or a message of the log, and the strings in the
functions BUILDERS. What differs from run to run is a HOLE. Variables are not followed: they are holes, too.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import dualdist

HOLE = "\0"
PART = "part"
"""The kind of a text of BUILDERS, which may be a part of an error's text or one of its lines."""

BUILDERS = (
    *("USAGE", "_called", "_died", "_failure", "_judge", "_unreachable", "_why_outside", "calls_differ"),
    *(
        "calls_failed",
        "describe_exit",
        "explain",
        "not_arrived",
        "nothing_matches",
        "silent_hosts",
        "text_of",
        "waited",
    ),
)
"""Functions and constants from which the texts of errors are made that are raised elsewhere."""

_PLACE_OF_TEXT = {"OSError": -1, "FileExistsError": 1, "gaierror": 1, "_fail": 1, "damaged": 1}
"""Name of a class or helper -> the index of the argument that is the text, if it is not the first."""
_ERROR = re.compile(r"(.*\.)?([A-Z]\w*Error|gaierror|error|damaged)|super\(\)\.__init__")
_WARNING = re.compile(r"(.*\.)?(_?warn(_explicit|_deprecated)?|_fail)|logger\.(warning|error)|sys\.stderr\.write")


class ErrorText(NamedTuple):
    """One text that a user can see."""

    place: str
    """FILE:LINE in the package."""
    kind: str
    """The class of the error, "warning" or PART."""
    text: str
    """In one line, with holes."""


def error_texts() -> Iterator[ErrorText]:
    """Yield all texts of the package that have a word."""
    folder = Path(dualdist.__file__).parent
    for file in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            for kind, text in _found(node):
                if re.search("[a-z]{2}", text):
                    line = getattr(node, "lineno", 0)
                    yield ErrorText(f"{file.relative_to(folder)}:{line}", kind, " ".join(text.split()))


def _found(node: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield the kind and text of each error and warning that `node` makes."""
    match node:
        case ast.FunctionDef(name=name) | ast.Assign(targets=[ast.Name(id=name)]) if name in BUILDERS:
            for part in ast.walk(node):
                is_docstring = isinstance(part, ast.Constant) and part.value == _docstring(node)
                if isinstance(part, ast.expr) and not is_docstring:
                    yield from ((PART, text) for text in _texts(part) if len(text.split()) > 2)
        case ast.Call(func=ast.Name(id="wrong")):
            given = dict(zip(("name", "rule", "value", "fix", "error"), node.args, strict=False))
            given |= {keyword.arg: keyword.value for keyword in node.keywords if keyword.arg is not None}
            kind = ast.unparse(given["error"]) if "error" in given else "ValueError"
            parts = [_texts(given[key]) if key in given else [""] for key in ("name", "rule", "fix")]
            for name, rule, fix in itertools.product(*parts):
                yield kind, f"`{name}` must be {rule}, but is {HOLE} instead. {fix}"
        case ast.Call(func=function, args=[_, *_] as arguments):
            path = ast.unparse(function)
            name = path.rpartition(".")[2]
            if (is_warning := _WARNING.fullmatch(path)) or _ERROR.fullmatch(path):
                kind = "warning" if is_warning else name if name[0].isupper() else "RuntimeError"
                place = _PLACE_OF_TEXT.get(name, 0)
                for text in _texts(arguments[place if place < len(arguments) else 0]):
                    yield kind, re.sub(r"%[.\d]*[a-z]", HOLE, text) if path.startswith("logger.") else text


def _docstring(node: ast.AST) -> str | None:
    return ast.get_docstring(node, clean=False) if isinstance(node, ast.FunctionDef) else None


def _texts(node: ast.expr) -> list[str]:
    """Return the strings that `node` may have, with holes."""
    match node:
        case ast.Constant(value=str(text)):
            return [text]
        case ast.JoinedStr(values=parts):
            return ["".join(texts) for texts in itertools.product(*map(_texts, parts))]
        case ast.FormattedValue(value=ast.IfExp() | ast.Constant() as value):
            return _texts(value)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return ["".join(texts) for texts in itertools.product(_texts(left), _texts(right))]
        case ast.IfExp(body=first, orelse=second) | ast.BoolOp(values=[first, second]):
            return [*_texts(first), *_texts(second)]
    return [HOLE]
