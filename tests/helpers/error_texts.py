"""The texts of all errors and warnings of the package, read from its sources.

The text is an argument where an error is made, `SomeError(text)`, whether it is raised there or later. The same holds
for helpers that make errors, and for warnings. Parts that differ from run to run are a HOLE. A text that is built
before is followed through variables, attributes, constants and functions of the package.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import dualdist

HOLE = "\0"
_DEPTH = 4
"""Through how many variables and functions a string is followed."""
_MOST = 64
"""How many texts one error may have, as one of several strings is chosen."""

_PLACE_OF_TEXT = {"OSError": -1, "FileExistsError": 1, "gaierror": 1, "_fail": 1, "damaged": 1}
"""Name of a class or helper -> the index of the argument that is the text, if it is not the first."""
_WARNINGS = ("warn", "warn_explicit", "warn_deprecated", "_warn")


class ErrorText(NamedTuple):
    """One text that a user can see."""

    place: str
    """FILE:LINE in the package."""
    kind: str
    """The class of the error, or "warning"."""
    text: str
    """In one line, with holes; without a letter if it is made elsewhere."""
    source: str
    """The expression that makes it."""


def error_texts(builders: Iterable[str]) -> list[ErrorText]:
    """Return all texts of the package. builders: functions that return the text of an error that is made elsewhere."""
    return list(_Sources(Path(dualdist.__file__).parent).error_texts(frozenset(builders)))


class _Sources:
    def __init__(self, folder: Path) -> None:
        files = sorted(folder.rglob("*.py"))
        self.trees = {str(file.relative_to(folder)): ast.parse(file.read_text()) for file in files}
        self.parents = {
            child: node
            for tree in self.trees.values()
            for node in ast.walk(tree)
            for child in ast.iter_child_nodes(node)
        }
        self.functions: dict[str, list[ast.FunctionDef]] = defaultdict(list)
        self.values: dict[tuple[ast.AST | None, str], list[ast.expr]] = defaultdict(list)
        """(function, name) -> what is assigned to the name there. None: of attributes, modules and classes."""
        for tree in self.trees.values():
            for node in ast.walk(tree):
                if isinstance(node, ast.FunctionDef):
                    self.functions[node.name].append(node)
                self._add_values(node)

    def _add_values(self, node: ast.AST) -> None:
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, ast.AnnAssign | ast.NamedExpr):
            targets = [node.target]
        else:
            return
        for target in targets:
            for name, value in _pairs(target, node.value):
                if isinstance(name, ast.Name):
                    self.values[self._function(node), name.id].append(value)
                elif isinstance(name, ast.Attribute):
                    self.values[self._module(node), name.attr].append(value)

    def _function(self, node: ast.AST | None) -> ast.AST | None:
        """Return the innermost function around `node`; None if there is none."""
        while node is not None and not isinstance(node := self.parents.get(node), ast.FunctionDef | None):
            pass
        return node

    def _module(self, node: ast.AST) -> ast.AST:
        while node in self.parents:
            node = self.parents[node]
        return node

    def error_texts(self, builders: frozenset[str]) -> Iterator[ErrorText]:
        for file, tree in self.trees.items():
            for node in ast.walk(tree):
                if isinstance(node, ast.Call):
                    found = self._call(node)
                elif isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                    found = self._raise(node.exc)
                elif isinstance(node, ast.Return) and node.value is not None:
                    function = self._function(node)
                    is_builder = isinstance(function, ast.FunctionDef) and function.name in builders
                    found = [("text", node.value, self._texts(node.value))] if is_builder else []
                else:
                    continue
                for kind, source, texts in found:
                    for text in sorted({" ".join(text.split()) for text in texts}):
                        yield ErrorText(f"{file}:{node.lineno}", kind, text, ast.unparse(source))

    def _call(self, call: ast.Call) -> list[tuple[str, ast.expr, list[str]]]:
        """Return (kind, expression, texts) of the error or warning that `call` makes, if it makes one."""
        name, arguments = _name(call.func), call.args
        if name == "wrong":
            return [self._wrong(call)]
        if name == "Verdict":  # every member raises its error
            errors = [keyword.value for keyword in call.keywords if keyword.arg == "error"]
            return [("CollectiveMismatchError", error, self._texts(error)) for error in errors]
        kind = _kind(call)
        if kind is None or not arguments:
            return []
        place = _PLACE_OF_TEXT.get(name, 0)
        source = arguments[place if place < len(arguments) else 0]
        texts = self._texts(source)
        if _is_logged(call):
            texts = [re.sub(r"%[.\d]*[a-z]", HOLE, text) for text in texts]
        return [(kind, source, texts)]

    def _wrong(self, call: ast.Call) -> tuple[str, ast.expr, list[str]]:
        """Return what `checks.wrong` makes."""
        given = dict(zip(("name", "rule", "value", "fix", "error"), call.args, strict=False))
        given |= {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg is not None}
        kind = _name(given["error"]) if "error" in given else "ValueError"
        fixes = self._texts(given["fix"]) if "fix" in given else [""]
        choices = itertools.product(self._texts(given["name"]), self._texts(given["rule"]), fixes)
        return (
            kind,
            call,
            [f"`{name}` must be {rule}, but is {HOLE} instead. {fix}" for name, rule, fix in choices],
        )

    def _raise(self, call: ast.Call) -> list[tuple[str, ast.expr, list[str]]]:
        """Return what `raise error(text)` makes, where the class is in a variable."""
        if not isinstance(call.func, ast.Name) or call.func.id in (*self.functions, "wrong") or not call.args:
            return []
        if call.func.id[0].isupper():
            return []
        return [("RuntimeError", call, self._texts(call.args[0]))]

    def _texts(self, node: ast.expr, depth: int = _DEPTH) -> list[str]:
        """Return the strings that `node` may have, with holes."""
        if depth == 0:
            return [HOLE]
        match node:
            case ast.Constant(value=str(text)):
                return [text]
            case ast.JoinedStr(values=parts):
                return _joined("", (self._texts(part, depth) for part in parts))
            case ast.FormattedValue(value=value, conversion=-1):
                return self._texts(value, depth)
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                return _joined("", (self._texts(left, depth - 1), self._texts(right, depth - 1)))
            case ast.BinOp(left=ast.Constant(value=str(text)), op=ast.Mult()):
                return ["", text]
            case ast.IfExp(body=body, orelse=orelse):
                return [*self._texts(body, depth - 1), *self._texts(orelse, depth - 1)]
            case ast.BoolOp(values=values):
                return [text for value in values for text in self._texts(value, depth - 1)]
            case ast.List(elts=elements):
                return _joined(" ", (self._texts(element, depth) for element in elements))
            case ast.Starred(value=value):
                return self._texts(value, depth)
            case ast.Call(func=ast.Attribute(value=ast.Constant(value="\n"), attr="join"), args=[lines]):
                return self._texts(lines, depth)
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)) if (
                len(self.functions[name]) == 1
            ):
                returns = [node for node in ast.walk(self.functions[name][0]) if isinstance(node, ast.Return)]
                values = [node.value for node in returns if node.value is not None]
                return [text for value in values for text in self._texts(value, depth - 1)] or [HOLE]
            case ast.Name(id=name):
                return self._of_values(self._assigned(node, name), depth)
            case ast.Attribute(value=owner, attr=name):
                own = self.values.get((self._module(node), name), [])
                is_class = isinstance(owner, ast.Name) and owner.id[0].isupper()
                return self._of_values(own or (self._constant(name) if is_class else []), depth)
        return [HOLE]

    def _of_values(self, values: list[ast.expr], depth: int) -> list[str]:
        return [text for value in values for text in self._texts(value, depth - 1)] or [HOLE]

    def _assigned(self, node: ast.AST, name: str) -> list[ast.expr]:
        """Return what is assigned to `name` in the functions around `node`, or else the constant of that name."""
        function = self._function(node)
        while isinstance(function, ast.FunctionDef):
            if (function, name) in self.values:
                return self.values[function, name]
            arguments = function.args
            if any(argument.arg == name for argument in (*arguments.args, *arguments.kwonlyargs)):
                return []
            function = self._function(function)
        return self._constant(name)

    def _constant(self, name: str) -> list[ast.expr]:
        values = self.values.get((None, name), [])
        return values if len(values) == 1 else []


def _kind(call: ast.Call) -> str | None:
    """Return the class of the error or "warning" if `call` makes one."""
    name = _name(call.func)
    if re.fullmatch(r"[A-Z]\w*Error|gaierror", name):
        return name
    if name == "__init__" and isinstance(next(iter(call.args), None), ast.Constant):
        return "RuntimeError"  # super().__init__(text), of an error whose text is always the same
    if name == "damaged":
        return "DamagedCheckpointError"
    is_end_of_job = name == "_fail" and len(call.args) == 2
    is_written = name == "write" and ast.unparse(call.func) == "sys.stderr.write"
    return "warning" if name in _WARNINGS or is_end_of_job or is_written or _is_logged(call) else None


def _is_logged(call: ast.Call) -> bool:
    return _name(call.func) in ("warning", "error") and ast.unparse(call.func).startswith("logger.")


def _name(function: ast.expr) -> str:
    """Return the last name of a function or class."""
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def _pairs(target: ast.expr, value: ast.expr | None) -> list[tuple[ast.expr, ast.expr]]:
    """Return (name or attribute, value) of an assignment, also of several at a time."""
    if isinstance(target, ast.Tuple) and isinstance(value, ast.IfExp):
        return [*_pairs(target, value.body), *_pairs(target, value.orelse)]
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        return list(zip(target.elts, value.elts, strict=True))
    return [] if value is None else [(target, value)]


def _joined(separator: str, parts: Iterable[list[str]]) -> list[str]:
    return [separator.join(texts) for texts in itertools.islice(itertools.product(*parts), _MOST)]
