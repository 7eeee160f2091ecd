"""Code blocks of a page of the documentation. As a script: runs those in Python, in order, in one namespace.

    python page_blocks.py PAGE

A comment may be on the line before a block: after `<!-- needs: ... -->` and `<!-- fragment -->` the block is not run.
"""

from __future__ import annotations

import re
import sys
import textwrap
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_FENCE = re.compile(
    r"^(?:(?P<comment>[ ]*<!--(?:(?!-->).)*-->)\n)?"
    r"(?P<indent>[ ]*)```(?P<language>\w*)[^\n]*\n(?P<text>.*?)^(?P=indent)```$",
    re.DOTALL | re.MULTILINE,
)


@dataclass(frozen=True)
class Block:
    """A block of code, and what the comment before it says."""

    language: str
    text: str
    line: int
    """The number of lines before its first one, in the page."""
    runs: bool
    needs: str
    """What running it needs, or ''."""
    introduction: str
    """What readers see before it: the title of the page, and its section up to here."""


def blocks(page: str) -> list[Block]:
    """Return the blocks of code of a page."""
    found = []
    for match in _FENCE.finditer(page):
        comment = (match["comment"] or "").strip().removeprefix("<!--").removesuffix("-->").strip()
        section = re.split(r"^#+ ", _FENCE.sub("", page[: match.start()]), flags=re.MULTILINE)[-1]
        found.append(
            Block(
                match["language"],
                textwrap.dedent(match["text"]),
                page.count("\n", 0, match.start("text")),
                not comment.startswith(("needs:", "fragment")),
                comment.removeprefix("needs:").strip() if comment.startswith("needs:") else "",
                f"{page.partition(chr(10))[0]}\n{section}",
            )
        )
    return found


def run(page: Path) -> None:
    """Run the blocks in Python as if a reader had pasted them into an empty file. Tracebacks have the page's lines."""
    for category in (DeprecationWarning, FutureWarning):
        warnings.simplefilter("error", category)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks(page.read_text()):
        if block.language == "python" and block.runs:
            exec(compile("\n" * block.line + block.text, str(page), "exec"), namespace)


if __name__ == "__main__":
    run(Path(sys.argv[1]))
