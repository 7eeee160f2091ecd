"""`dualdist run` in tests: what it runs, and how it ended."""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass

from .process_watch import Watched

FAMILY = """\
import os, signal, subprocess, sys
grandchild = subprocess.Popen([sys.executable, '-c',
    "import os, signal; os.setsid(); print('up', flush=True); signal.pause()"], stdout=subprocess.PIPE)
grandchild.stdout.readline()
with open(f"{os.environ['FAMILIES']}/{os.getpid()}", "w") as file:
    file.write(str(grandchild.pid))
print("up", flush=True)
"""
"""A process that starts another one in a new session, and writes both process ids into the folder FAMILIES."""

STUBBORN = FAMILY.replace("os.setsid();", "os.setsid(); signal.signal(15, signal.SIG_IGN);")


@dataclass(frozen=True)
class Ended:
    """How `dualdist run` ended. `written` returns the output of one rank, without the prefix."""

    code: int
    output: bytes
    errors: str

    def written(self, rank: int, stream: str = "stdout") -> bytes:
        text = self.output if stream == "stdout" else self.errors.encode(errors="surrogateescape")
        lines = re.findall(rb"\[1,(\d+)\]<(\w+)>:([^\r\n]*(?:\r\n|\r|\n))", text)
        return b"".join(line for who, which, line in lines if (int(who), which.decode()) == (rank, stream))


Run = Callable[..., Ended]
Families = Callable[[], Watched]


def python(source: str, *arguments: str) -> list[str]:
    return [sys.executable, "-c", textwrap.dedent(source), *arguments]
