"""The code cells of a Jupyter notebook as one text of Python, because they share their names.

A changed text changes the strings of its cells in the file; every other byte stays. What is not Python is a comment in
the text: lines with `%`, `!` or `?`, and a whole cell with a `%%` line if the rest cannot be parsed.
"""

from __future__ import annotations

import ast
import json
import re
from typing import Any

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
