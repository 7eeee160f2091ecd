"""The output of `dualdist run`: its form, its limits, and what happens while nobody reads it."""

from __future__ import annotations

import contextlib
import io
import os
import pty
import random
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dualdist.processes.hosts import AGENT_COMMAND
from dualdist.processes.job import AgentConnection, RunOptions
from dualdist.processes.output import CUT, LONGEST_LINE, Output, Sink

from ..helpers.run_command import FAMILY, STUBBORN, Families, Run, python
from ..helpers.world import ROOT

ENDLESS = STUBBORN + "signal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True: os.write(1, b'x' * 99 + b'\\n')"
HERE, OVER_SSH = ("-np", "1"), ("-H", "hostA:1")


@contextlib.contextmanager
def started(*arguments: str, merged: bool = False) -> Iterator[subprocess.Popen[bytes]]:
    """A launcher whose output goes to pipes that only the test reads. merged: to one pipe."""
    with subprocess.Popen(
        [sys.executable, "-m", "dualdist", "run", *arguments],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT if merged else subprocess.PIPE,
        bufsize=0,
    ) as launcher:
        try:
            yield launcher
        finally:
            launcher.kill()


def peak_memory(pid: int) -> int:
    """Return the largest memory that the process has used, in bytes."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))


def test_closing_waits_until_everything_is_written() -> None:
    reader, writer = os.pipe()
    sink, data = Sink(writer, lambda: None), bytes(1 << 22)  # more than a pipe holds
    sink.put(data)
    assert not sink.close(0.0)  # nobody reads
    with ThreadPoolExecutor(1) as pool, open(reader, "rb") as pipe:
        received = pool.submit(pipe.read, len(data))
        assert sink.close(60.0) and received.result() == data
    os.close(writer)


@pytest.mark.only_ci(where=lambda where: where is OVER_SSH)
@pytest.mark.usefixtures("hosts")
@pytest.mark.parametrize("where", [HERE, OVER_SSH], ids=["here", "ssh"])
def test_a_signal_ends_the_job_while_nobody_reads_its_output(where: tuple[str, str], families: Families) -> None:
    with started(*where, *python(ENDLESS), merged=True) as launcher:
        assert launcher.stdout is not None
        assert launcher.stdout.read(1)
        family = families()
        launcher.terminate()
        assert launcher.wait(60) == 128 + signal.SIGTERM
        assert family.left(0) == []


@pytest.mark.only_ci
@pytest.mark.usefixtures("hosts")
@pytest.mark.parametrize("where", [HERE, OVER_SSH], ids=["here", "ssh"])
def test_two_interrupts_end_the_job_while_nobody_reads_its_output(where: tuple[str, str], families: Families) -> None:
    with started(*where, *python(ENDLESS)) as launcher:
        assert launcher.stdout is not None and launcher.stderr is not None
        assert launcher.stdout.read(1)
        family = families()
        launcher.send_signal(signal.SIGINT)
        assert b"received SIGINT" in launcher.stderr.readline()
        launcher.send_signal(signal.SIGINT)
        assert launcher.wait(60) == 128 + signal.SIGINT
        assert family.left(0) == []


@pytest.mark.parametrize("is_read", [True, False], ids=["read later", "never read"])
def test_a_failure_ends_the_others_while_nobody_reads_the_output(
    is_read: bool, families: Families, tmp_path: Path
) -> None:
    source = FAMILY + (
        "if os.environ['DUALDIST_RANK'] == '1':\n"
        "    open(sys.argv[1]).read()\n"
        "    sys.exit(3)\n"
        "for _ in range(3000): os.write(1, b'x' * 99 + b'\\n')\n"
        "open(sys.argv[1], 'w').close()\n"
        "signal.pause()\n"
    )
    fifo = tmp_path / "written"
    os.mkfifo(fifo)
    with started("-np", "2", *python(source, str(fifo))) as launcher:
        assert launcher.stdout is not None and launcher.stderr is not None
        assert b"rank 1 on localhost ended with exit code 3" in launcher.stderr.readline()
        assert families().left() == []
        if is_read:
            assert launcher.stdout.read().count(b"[1,0]<stdout>:" + b"x" * 99 + b"\n") == 3000
        else:
            launcher.terminate()
        assert launcher.wait(60) == 3


@pytest.mark.only_ci
def test_a_long_line_takes_little_memory(families: Families) -> None:
    source = FAMILY + ("for _ in range(200): os.write(1, b'x' * 1000000)\nprint('\\nwritten')\nsignal.pause()\n")
    with started("-np", "1", *python(source)) as launcher:
        assert launcher.stdout is not None
        assert launcher.stdout.readline().endswith(b"up\n")
        before = peak_memory(launcher.pid)
        last = b""
        while b"written" not in last:
            last = last[-100:] + launcher.stdout.read(1 << 20)
        assert peak_memory(launcher.pid) - before < 50e6


def test_a_long_line_is_cut_into_marked_pieces(tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    draw, limit, prefix = random.Random(1), LONGEST_LINE, b"[1,0]<stdout>:"
    long, exact = draw.randbytes(5 * limit // 4).hex().encode(), b"x" * limit
    text = b"a\n" + long + b"\r\n" + exact + b"\n\nend"
    with Output(1, tmp_path) as output:
        start = 0
        while start < len(text):
            count = draw.randrange(1, 1 << 16)
            output.write(0, 1, text[start : start + count])
            start += count
        output.end_lines()
        while output.unwritten():
            select.select([output.reader], [], [])
            output.empty_reader()
    pieces = [long[:limit] + CUT, long[limit : 2 * limit] + CUT, long[2 * limit :] + b"\r\n"]
    expected = b"".join(prefix + line for line in (b"a\n", *pieces, exact + b"\n", b"\n", b"end\n"))
    assert capfdbinary.readouterr().out == expected
    assert (tmp_path / "rank.0" / "stdout").read_bytes() == text


def test_an_agent_sends_only_as_much_output_as_is_granted() -> None:
    source = """
    import os, signal
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        os.write(1, bytes(1 << 16))
    """
    window, pipe = 100_000, 1 << 16
    options = RunOptions(python(source), [])
    agent = AgentConnection(options, "localhost", AGENT_COMMAND, os.environ, {0: {}}, window=window)
    received = granted = 0
    for _ in range(3):
        granted = received + window
        while received < granted:
            received += sum(len(event.data) for event in agent.read())
        agent.grant()
    granted = received + window
    agent.end(signal.SIGTERM, 0.5)
    while agent.open:
        received += sum(len(event.data) for event in agent.read())
    agent.close(10.0)
    assert received <= granted + 2 * pipe  # the last chunk, and what the process left in its pipe


def test_output_is_passed_on_in_whole_lines_as_it_was_written(run: Run, tmp_path: Path) -> None:
    source = """
    import os, sys
    rank = os.environ["DUALDIST_RANK"].encode()
    for stream in (1, 2):
        for number in range(300):
            os.write(stream, b"%b:%d:" % (rank, number)); os.write(stream, b"\\xff\\n")
        with open(stream, "wb", 0, closefd=False) as out:
            out.write(b"x" * 300000 + b"\\n")
        for part in (b" 1%\\r", b" 2%\\r", b"dos\\r", b"\\n", b"\\n", b"the end"):
            os.write(stream, part)
    """
    ended = run("-np", "3", "--output", str(tmp_path / "out"), *python(source))
    assert ended.code == 0
    for rank in range(3):
        lines = b"".join(b"%d:%d:\xff\n" % (rank, number) for number in range(300)) + b"x" * 300000 + b"\n"
        for stream in ("stdout", "stderr"):
            written = lines + b" 1%\r 2%\rdos\r\n\nthe end"
            assert (tmp_path / "out" / f"rank.{rank}" / stream).read_bytes() == written
            assert ended.written(rank, stream) == lines + b" 1%\n 2%\ndos\r\n\nthe end\n"


def test_ranks_in_output_folders_are_padded_and_old_output_is_replaced(run: Run, tmp_path: Path) -> None:
    for _ in range(2):
        run("-np", "11", "--output-filename", str(tmp_path), "sh", "-c", "echo $DUALDIST_RANK")
    assert {path.name for path in tmp_path.iterdir()} == {f"rank.{rank:02}" for rank in range(11)}
    assert (tmp_path / "rank.10" / "stdout").read_text() == "10\n"
    assert (tmp_path / "rank.10" / "stderr").read_text() == ""


BARS = """
import sys, tqdm
for _ in tqdm.tqdm(range(3), mininterval=0, bar_format="{n}/{total}", file=sys.stdout):
    pass
for _ in tqdm.tqdm(range(3), mininterval=0, bar_format="{n} of {total}", file=sys.stdout, leave=False):
    pass
print("done")
"""


def test_each_update_of_a_progress_bar_is_a_line_of_a_file(run: Run) -> None:
    ended = run("-np", "2", *python(BARS))
    # tqdm itself writes the last state of a bar that it leaves twice.
    updates = ["0/3", "1/3", "2/3", "3/3", "3/3", "0 of 3", "1 of 3", "2 of 3", "3 of 3", "done"]
    expected = [f"[1,{rank}]<stdout>:{update}" for rank in range(2) for update in updates]
    assert sorted(ended.output.decode().splitlines()) == sorted(expected)


def test_a_progress_bar_is_drawn_in_place_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "dualdist", "run", "-np", "1", *python(BARS)]
    with (
        os.fdopen(ours, "rb", 0) as terminal,
        subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=theirs) as launcher,
    ):
        os.close(theirs)
        text = b""
        with contextlib.suppress(OSError):  # the end of a terminal
            while data := terminal.read(1 << 16):
                text += data
    assert launcher.returncode == 0
    start = b"\x1b[K[1,0]<stdout>:"
    first = b"".join(start + b"%d/3\r" % number for number in range(4)) + start + b"3/3\r\n"
    second = b"".join(start + b"%d of 3\r" % number for number in range(4))
    assert text == first + second + start + b"done\r\n"


class NotebookStream(io.TextIOBase):
    """As ipykernel's OutStream: its file is the terminal of the server, and what is written to 1 is shown."""

    def __init__(self, terminal: int) -> None:
        self.terminal = terminal

    def fileno(self) -> int:
        return self.terminal


def test_a_notebook_shows_the_output(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    with open(tmp_path / "terminal", "wb") as terminal:
        monkeypatch.setattr(sys, "stdout", NotebookStream(terminal.fileno()))
        with Output(1, None) as output:
            output.write(0, 1, b"text\n")
            while output.unwritten():
                select.select([output.reader], [], [])
                output.empty_reader()
    assert capfdbinary.readouterr().out == b"[1,0]<stdout>:text\n"
    assert (tmp_path / "terminal").read_bytes() == b""
