"""The source of a script for `dualdist migrate`: what its names mean, and the launchers' variables that it uses."""

from __future__ import annotations

import ast
import contextlib
import io
import itertools
import json
import re
import sys
import tokenize
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ..core.launch.launchers import LAUNCHERS
from ..errors import ConfigurationError

Edit = tuple[int, int, str]
"""The first character of a part of the source, its end, and its new text."""
SOURCE_RULE = f"readable source of Python {sys.version_info.major}.{sys.version_info.minor}"


@dataclass(frozen=True)
class Finding:
    """One line of the report, and the edits that make the change."""

    line: int
    kind: Literal["change", "by hand", "not needed", "differs"]
    text: str
    edits: tuple[Edit, ...] = ()


VARIABLES = {
    variable: (number, row.name)
    for row in reversed(LAUNCHERS)
    for number in ("rank", "size", "local_rank", "local_size")
    if (variable := getattr(row, number)) and not variable.startswith("DUALDIST_")
} | {
    "HOROVOD_CROSS_RANK": ("cross_rank", "horovodrun"),
    "HOROVOD_CROSS_SIZE": ("cross_size", "horovodrun"),
    "SLURM_NTASKS": ("size", "srun"),
    "SLURM_NPROCS": ("size", "srun"),
    "MASTER_ADDR": ("", "torchrun"),
    "MASTER_PORT": ("", "torchrun"),
}
"""Variable of a launcher -> dualdist's function for its value, and the launcher."""
SET_BY_INIT = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def lines_of(text: str) -> list[str]:
    """Return the lines of Python with their ends. str.splitlines knows more ends, such as a form feed."""
    return re.findall(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+\Z", text)


@contextlib.contextmanager
def usable(path: str, rule: str) -> Iterator[None]:
    """Raise ConfigurationError where the block cannot read, parse or write a file."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the script's strings
            yield
    except (OSError, SyntaxError, ValueError, LookupError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigurationError(f"FILE must be {rule}, but {path} is not: {reason}.") from None


class Source:
    """A file, and what the names in it mean.

    A name has a meaning only if all its bindings in the file agree, in whatever scope they are.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        with usable(path, SOURCE_RULE):
            data = Path(path).read_bytes()
            self.encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
            self.raw, ending = data.decode(self.encoding), Path(path).suffix.lower()
            if ending not in (".py", ".ipynb") and (ending or data[:2] != b"#!"):
                raise ValueError("its name ends neither in .py nor in .ipynb")
            self.notebook = Notebook(self.raw) if ending == ".ipynb" else None
            self.text = self.notebook.text if self.notebook else self.raw
            self.tree = ast.parse(self.text, path)
        self.lines = lines_of(self.text)
        self.starts = list(itertools.accumulate(map(len, self.lines), initial=0))
        self.nodes: list[Any] = list(ast.walk(self.tree))
        self.parents = {child: node for node in self.nodes for child in ast.iter_child_nodes(node)}
        self.bindings: dict[str, list[tuple[Any, str]]] = {}
        """Name -> the nodes that bind it, and the module or attribute that it then means; "" for anything else."""
        for node in self.nodes:
            for name, meaning in _bound(node):
                self.bindings.setdefault(name, []).append((node, meaning))
        meanings = [meaning for bound in self.bindings.values() for _, meaning in bound]
        self.packages = {meaning.partition(".")[0] for meaning in meanings}
        self.imported = {part for meaning in meanings for part in meaning.split(".")}
        top = [name for name in self.bindings if self.meaning(name) in ("dualdist", "horovod.torch")]
        self.imports_dualdist = bool(top)
        self.module = top[0] if top else "hvd" if "hvd" not in self.bindings else "dualdist"
        """The name of dualdist in this file, or the one that it gets."""
        self.joins = [call for package in ("horovod", "dualdist") for call in self.calls(package, "init")]
        options = [call for call in self.nodes if getattr(getattr(call, "func", 0), "attr", "") == "add_argument"]
        flags = {call: {getattr(flag, "value", "") for flag in call.args} for call in options}
        options = [call for call in options if flags[call] & {"--local_rank", "--local-rank"}]
        self.options = [call for call in options if "LOCAL_RANK" not in self.segment(call)]
        """The calls that add an option --local_rank with another default than LOCAL_RANK."""
        self.accesses = [(node, *access) for node in self.nodes if (access := _access(self, node))]
        """The strings that name launchers' variables: each with the variable, and whether it is set."""

    def place(self, line: int) -> str:
        """Return how the report names a line."""
        return f"{self.path}:{self.notebook.place(line) if self.notebook else line}"

    def span(self, node: Any) -> tuple[int, int]:
        """Return the first character of a node, and its end. (ast counts bytes of UTF-8 in each line.)"""
        places = ((node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset))
        lines = [(line - 1, self.lines[line - 1].encode()[:byte].decode()) for line, byte in places]
        first, end = (self.starts[line] + len(before) for line, before in lines)
        return first, end

    def segment(self, node: Any) -> str:
        """Return the text of a node."""
        return self.text[slice(*self.span(node))]

    def change(self, node: Any, new: str, text: str) -> Finding:
        """Return the finding that replaces an expression. Before Python 3.12, ast misplaces some in f-strings."""
        try:
            is_there = ast.unparse(ast.parse(f"({self.segment(node)}\n)")) == ast.unparse(node)
        except (SyntaxError, ValueError, IndexError):
            is_there = False
        edits = ((*self.span(node), new),) if is_there else ()
        return Finding(node.lineno, "change" if is_there else "by hand", text, edits)

    def meaning(self, name: str) -> str:
        """Return what a name is imported from; "" if it is bound in another way, too, except to None."""
        pairs = [(getattr(self.parents[node], "value", 0), meaning) for node, meaning in self.bindings.get(name, ())]
        bound = {meaning for value, meaning in pairs if meaning or getattr(value, "value", 0) is not None}
        return bound.pop() if len(bound) == 1 else ""

    def dotted(self, node: Any) -> str:
        """Return what a name or a chain of attributes means, such as torch.distributed.get_rank; "" if unknown."""
        if isinstance(node, ast.Attribute):
            return f"{value}.{node.attr}" if (value := self.dotted(node.value)) else ""
        return self.meaning(node.id) if isinstance(node, ast.Name) else ""

    def calls(self, package: str, name: str) -> list[Any]:
        """Return the calls of a function, wherever the package has it."""
        found = [(node, self.dotted(node.func)) for node in self.nodes if isinstance(node, ast.Call)]
        return [node for node, path in found if path.startswith(f"{package}.") and path.endswith(f".{name}")]

    def values(self, node: Any, depth: int = 3) -> list[Any]:
        """Return the expressions of which an expression has the value: of a variable, all that the file assigns."""
        parts = [node.body, node.orelse] if isinstance(node, ast.IfExp) else []
        if isinstance(node, ast.Name):
            parents = [self.parents[bound] for bound, _ in self.bindings.get(node.id, ())]
            is_known = all(isinstance(parent, ast.Assign) for parent in parents)
            parts = [each.value for each in parents] if is_known else []
        found = [value for part in parts if depth for value in self.values(part, depth - 1)]
        return found or [node]

    def function(self, node: Any) -> Any:
        """Return the function that a node is in, or the module."""
        while not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Module):
            node = self.parents[node]
        return node


def _bound(node: Any) -> Iterator[tuple[str, str]]:
    """Yield the names that a node binds, and the module or attribute that each then means; "" for anything else."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            root = alias.name.partition(".")[0]
            yield (alias.asname, alias.name) if alias.asname else (root, root)
    elif isinstance(node, ast.ImportFrom):
        for alias in node.names:
            yield alias.asname or alias.name, "" if node.level else f"{node.module}.{alias.name}"
    elif isinstance(node, ast.Name):
        if not isinstance(node.ctx, ast.Load):
            yield node.id, ""
    elif not isinstance(node, ast.alias | ast.keyword):
        # Arguments, functions, classes, exceptions and patterns.
        names = (getattr(node, field, None) for field in ("arg", "name", "rest"))
        yield from ((name, "") for name in names if isinstance(name, str))


def _access(source: Source, node: Any) -> tuple[str, bool] | None:
    """Return the launcher's variable that a string names, and whether it is set there; None for other nodes."""
    name, parent = str(getattr(node, "value", None)), source.parents.get(node)
    if not isinstance(node, ast.Constant) or name not in VARIABLES:
        return None
    function = getattr(parent, "func", None) or getattr(parent, "value", None)
    place = function or getattr(parent, "comparators", [None])[0]
    is_environment = source.dotted(place).startswith(("os.environ", "os.getenv"))
    if not is_environment and name in SET_BY_INIT:  # RANK may be any word
        return None
    is_stored = isinstance(getattr(parent, "ctx", None), ast.Store)
    return name, is_environment and (is_stored or source.dotted(function).endswith(".setdefault"))


# The code cells of a Jupyter notebook are one text of Python, because they share their names. A changed text changes
# the strings of its cells in the file; every other byte stays. What is not Python is a comment in the text: lines with
# `%`, `!` or `?`, and a whole cell with a `%%` line if the rest cannot be parsed.

_JSON: Any = json  # with names that its type stubs lack
_CELL, HIDDEN = "#\x1e", "#\x1f"
"""The line before each cell, and what makes a comment of a line. Notebooks have neither."""
_IPYTHON = re.compile(r"([ \t]*)((?:[%!?]|[\w., *()\[\]]+=[ \t]*[%!]|.*\?[ \t\r]*$)(?:.*\\\n)*.*)", re.MULTILINE)


class Notebook:
    """What the text of a file has. Raises ValueError if it is no notebook, or if a cell cannot be parsed."""

    def __init__(self, raw: str) -> None:
        self._raw = raw
        decoder = _JSON.JSONDecoder()
        decoder.parse_string = _placed
        decoder.scan_once = _JSON.scanner.py_make_scanner(decoder)
        self._cells = []
        """Of each code cell: its number, its source as strings with places, whether that is a list, and its text."""
        try:
            for number, cell in enumerate(decoder.decode(raw)["cells"], 1):
                if cell["cell_type"][0] == "code":
                    is_list = isinstance(cell["source"], list)
                    parts = cell["source"] if is_list else [cell["source"]]
                    text = _python("".join(line for line, _ in parts), number)
                    self._cells.append((number, parts, is_list, text))
        except (TypeError, LookupError):
            raise ValueError("it is no notebook of format 4") from None
        self.text = "".join(f"{_CELL}\n{text}\n" for *_, text in self._cells)

    def place(self, line: int) -> str:
        """Return where a line of the text is: the number of its cell, counting all, and its line there."""
        before = self.text.split("\n")[line - 1 :: -1]
        return f"cell {self._cells[before.count(_CELL) - 1][0]}:{before.index(_CELL)}"

    def changed(self, text: str) -> str:
        """Return the file after `text`, which was `self.text`, has been changed."""
        raw = self._raw
        pieces = [piece.removesuffix("\n") for piece in text.split(f"{_CELL}\n")[1:]]
        for (_, parts, is_list, before), piece in reversed([*zip(self._cells, pieces, strict=True)]):
            if piece != before:
                after = re.sub(f"0?{HIDDEN}", "", piece)
                lines = after.splitlines(keepends=True) if is_list else [after]
                written = {line: raw[span] for line, span in parts}
                new = (written.get(line) or json.dumps(line, ensure_ascii=raw.isascii()) for line in lines)
                start, end = parts[0][1].start, parts[-1][1].stop
                between = raw[parts[0][1].stop : parts[1][1].start] if len(parts) > 1 else ", "
                raw = raw[:start] + between.join(new) + raw[end:]
        return raw


def _placed(raw: str, start: int, strict: bool) -> tuple[tuple[str, slice], int]:
    """Read a string as json does, together with where it is, quotes included."""
    value, end = _JSON.decoder.scanstring(raw, start, strict)
    return (value, slice(start - 1, end)), end


def _python(cell: str, number: int) -> str:
    """Return a cell with comments in place of what is not Python."""
    text, may_be_other = cell, cell.lstrip().startswith("%%")
    while True:
        try:
            ast.parse(text)
            return text
        except SyntaxError as error:
            start = sum(len(line) + 1 for line in text.split("\n")[: (error.lineno or 1) - 1])
            found = _IPYTHON.match(text, start)
            if found is None or HIDDEN in found[0]:
                if may_be_other:
                    return re.sub("^", HIDDEN, cell, flags=re.MULTILINE)
                raise ValueError(f"cell {number}, line {error.lineno}: {error.msg}") from None
            statement = "" if found[2].startswith("%%") else "0"  # because a block needs one
            hidden = found[2].replace("\n", f"\n{HIDDEN}")
            text = f"{text[:start]}{found[1]}{statement}{HIDDEN}{hidden}{text[found.end() :]}"
