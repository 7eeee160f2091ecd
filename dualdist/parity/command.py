"""Run the same training script in two ways, and say at which step, rank and tensor they first differ, and why.

dualdist parity -np 2 --left torch+gloo@torchrun --right horovod+gloo@horovodrun train.py ARGS
dualdist parity -np 2 --right "torch+gloo@torchrun,OMP_NUM_THREADS=4,python=../old/.venv" train.py
dualdist parity --right "torch+gloo x1" train.py
dualdist parity --record here.json train.py && dualdist parity --against here.json --right horovod+mpi@mpirun train.py

A cell is BACKEND+TRANSPORT[@LAUNCHER][ xN][,NAME=VALUE ...]. NAME=VALUE sets a variable of the environment, python=PATH
another interpreter or virtual environment. LAUNCHER is torchrun, horovodrun, mpirun, exec (`mpirun dualdist exec`) or
run (`dualdist run`). The script stays as it is, and is ended after the steps. It may use dualdist, torch.distributed
or Horovod, which is dualdist.compat with the backend torch. Exit code: 0 equal, or equal up to rounding of at most
--tolerance; 1 different; 2 could not run, or not within --timeout: then the error has the line in which each rank was;
3 equal up to rounding of more than --tolerance.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..core.backends import DISTRIBUTED_BACKENDS, TRANSPORTS
from ..errors import ConfigurationError
from ..observation.hang import shown_place
from ..observation.report import new_figure, save_figure
from ..processes.command import whole_number
from ..processes.hosts import mpirun_command
from .comparison import Comparison, compare
from .records import Difference, Record

_PACKAGE = Path(__file__).parents[1]
_CELL = re.compile(r"(\w+)\+(\w+)(?:@(\w+))?(?: ?x([0-9]+))?", re.ASCII)
_LEFT, _RIGHT = "torch+gloo@torchrun", "horovod+gloo@horovodrun"
_FORMAT = 4  # of a record; older releases write another one
_TAIL = 25  # lines of a failed cell's output to show
_WARNINGS = 5  # of each side to show
_STACKS_SIGNAL = signal.SIGRTMIN + 5  # what the ranks of a cell that hangs answer with their stacks
_STACKS_SECONDS = 5.0  # how long to wait for what the ranks of a cell that hangs write


@dataclass(frozen=True)
class Cell:
    """How to start the script."""

    name: str
    backend: str
    transport: str
    launcher: str
    size: int
    python: str
    variables: dict[str, str]


_LAUNCHERS = {
    "torchrun": "{python} -m torch.distributed.run --standalone --nproc-per-node {size} --no-python {python}",
    "horovodrun": "horovodrun --{controller} -np {size} {python}",
    "mpirun": "mpirun {python}",
    "exec": "mpirun {python} -m dualdist exec",
    "run": "{python} -m dualdist run -np {size} {python}",
}
"""Launcher -> what starts the arguments of a Python in all processes."""


def _start(cell: Cell) -> list[str]:
    """Return the words of the launcher. Raises ConfigurationError when it is not installed."""
    path = os.pathsep.join([os.path.dirname(cell.python), os.environ.get("PATH", os.defpath)])
    values = {**vars(cell), "controller": "mpi" if TRANSPORTS[cell.transport].needs_mpi else "gloo"}
    program, *words = [word.format_map(values) for word in _LAUNCHERS[cell.launcher].split()]
    found = shutil.which(program, path=path)
    make = {"mpirun": mpirun_command}.get(program)
    start = make(cell.size, words) if make else [found, *words] if found else None
    if start is None:
        raise ConfigurationError(f"{cell.name} needs {program}, but it is not on PATH. Install it.")
    return start


def parse_cell(text: str, size: int) -> Cell:
    """Return the cell that `text` describes. size: the number of processes, if it does not say."""
    name, *settings = re.split(r",\s*(?=\w+=)", text)
    found = _CELL.fullmatch(name.strip())
    variables = dict(setting.split("=", 1) for setting in settings if "=" in setting)
    if found is None or len(variables) != len(settings):
        raise ConfigurationError(
            "A cell must be BACKEND+TRANSPORT[@LAUNCHER][ xN][,NAME=VALUE ...], but is "
            f"{text!r} instead. Write for example {_LEFT}."
        )
    backend, transport, launcher, given = found.groups()
    launcher, number = launcher or f"{backend}run", int(given or size)
    python = Path(variables.pop("python", sys.executable)).expanduser()
    python = python / "bin" / "python" if python.is_dir() else python
    program = shutil.which(python)
    known = ((backend, DISTRIBUTED_BACKENDS), (transport, TRANSPORTS), (launcher, _LAUNCHERS))
    wrong = [(f"one of {', '.join(names)}", repr(value)) for value, names in known if value not in names]
    if program is None:
        wrong.append(("an interpreter or environment", str(python)))
    if number < 1:
        wrong.append(("at least 1 process", str(number)))
    if wrong:
        raise ConfigurationError("The cell {!r} must have {}, but has {} instead.".format(text, *wrong[0]))
    return Cell(text, backend, transport, launcher, number, os.path.abspath(str(program)), variables)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `dualdist parity`."""
    parser.usage = "dualdist parity [-np N] [--left CELL] [--right CELL] [OPTIONS] [-m] SCRIPT ARGS"
    add = parser.add_argument
    add("-np", "--num-proc", dest="size", type=whole_number, default=2, metavar="N", help="processes (2)")
    add("--left", metavar="CELL", default=_LEFT, help="the first way to run it (%(default)s)")
    add("--right", metavar="CELL", default=_RIGHT, help="the second way to run it (%(default)s)")
    add("--steps", type=whole_number, default=50, metavar="K", help="optimizer steps (%(default)s)")
    add("--timeout", type=float, metavar="SECONDS", help="end a cell that takes longer")
    text = "exit with 3 if rounding changes a tensor by more than this part of it (%(default)s; inf: never)"
    add("--tolerance", type=float, default=1e-4, metavar="T", help=text)
    text = "the step with which the right begins, a resumed run (found by its weights)"
    add("--start-step", type=whole_number, metavar="K", help=text)
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--record", type=Path, metavar="FILE", help="only run --left, and record it")
    only.add_argument("--against", type=Path, metavar="FILE", help="compare --right with such a record")
    add("--json", type=Path, metavar="FILE", help="write the result as JSON")
    add("--plot", type=Path, metavar="FILE.png", help="draw losses and differences (needs matplotlib)")
    add("-m", action="store_true", dest="is_module", help="the script is a Python module")
    # One argument for both: of two, argparse would drop a "--" of the script.
    add("command", nargs=argparse.REMAINDER, metavar="SCRIPT ARGS", help="the script and its arguments")


def execute(args: argparse.Namespace) -> int:
    """Run the cells and print the comparison. Returns the exit code of the module's docstring."""
    picture = None if args.plot is None else new_figure(7, 6)
    for option in ("record", "json", "plot"):
        file = getattr(args, option)
        if file is not None and not file.absolute().parent.is_dir():
            raise ConfigurationError(f"`--{option}` must be a file in a folder that exists, but is {file}.")
    is_time = args.timeout is None or 0 < args.timeout < threading.TIMEOUT_MAX
    if args.steps < 1 or not args.tolerance >= 0 or not is_time:
        raise ConfigurationError(
            "`--steps` must be at least 1, `--tolerance` at least 0, and `--timeout` a positive number of seconds."
        )
    if not args.is_module and not Path(args.command[0] if args.command else "").is_file():
        raise ConfigurationError(
            f"SCRIPT must be a file, but {' '.join(args.command[:1]) or 'nothing'} is none. A module needs -m."
        )
    command = ["-m"] * args.is_module + args.command
    left = parse_cell(args.left, args.size)
    if args.record is not None:
        if args.json is not None or args.plot is not None:
            raise ConfigurationError("`--json` and `--plot` show a comparison: leave them out with --record.")
        args.record.write_text(json.dumps(run_cell(left, args.steps, command, args.timeout)))
        return 0
    right = parse_cell(args.right, args.size)
    run = functools.partial(run_cell, steps=args.steps, command=command, timeout=args.timeout)
    records = run(left) if args.against is None else _read(args.against), run(right)
    result = compare(*records, args.tolerance, args.start_step)
    sys.stdout.writelines(f"{line}\n" for line in _report(*records, result, args.tolerance))
    if args.json is not None:
        args.json.write_text(json.dumps(_as_json(*records, result, args.tolerance), indent=2))
    if picture is not None:
        _draw(picture, *records, result)
        save_figure(picture, args.plot)
    return 1 if result.first is not None else 3 * (result.largest > args.tolerance)


def _read(file: Path) -> Record:
    try:
        record: Record = json.loads(file.read_text())
        if record["format"] == _FORMAT and record["ranks"][0]["values"] and record["steps"]:
            return record
    except (OSError, ValueError, KeyError, IndexError, TypeError):
        pass
    raise ConfigurationError(f"`--against` must be a file that --record has written, but {file} is not one.")


def run_cell(cell: Cell, steps: int, command: Sequence[str], timeout: float | None) -> Record:
    """Run the script in a cell, and return what its ranks recorded.

    Raises ConfigurationError when it fails, or takes longer than `timeout` seconds.
    """
    sys.stderr.write(f"dualdist parity: running {cell.name}\n")
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="dualdist-parity-") as folder:
        numbers = [str(steps), str(cell.size), cell.backend, str(int(_STACKS_SIGNAL))]
        recorder = ["-m", "dualdist.parity.recorder", folder, *numbers, "--"]
        packages = Path(folder) / "packages"  # only this one: another Python has a torch of its own
        packages.mkdir()
        (packages / _PACKAGE.name).symlink_to(_PACKAGE)
        env = os.environ | cell.variables
        env |= {"DUALDIST_BACKEND": cell.backend, "DUALDIST_TRANSPORT": cell.transport}
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [env.get("PYTHONPATH"), str(packages)]))
        with (Path(folder) / "output").open("w+b") as output:
            start, none = [*_start(cell), *recorder, *command], subprocess.DEVNULL
            process = subprocess.Popen(start, stdin=none, stdout=output, stderr=output, env=env)
            former = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
            try:
                code = process.wait(timeout)
            except subprocess.TimeoutExpired:
                error = f"{cell.name} must end within {timeout:g} s (--timeout), but did not:"
                raise ConfigurationError("\n  ".join([error, *_where(Path(folder), cell.size)])) from None
            finally:  # if it has not ended, it ends its processes, which write to the folder
                process.terminate()
                process.wait()
                signal.signal(signal.SIGTERM, former)
            output.seek(0)
            lines = output.read().decode(errors="replace").splitlines()
        ranks = [json.loads(file.read_text()) for file in Path(folder).glob("rank-*.json")]
    ranks.sort(key=lambda rank: int(rank["rank"]))
    has_failed = len(ranks) != cell.size or any(rank["error"] is not None for rank in ranks)
    if has_failed or not all(rank["steps"] for rank in ranks):
        why = f"it ended with {code}" if has_failed else "a rank made no step of an optimizer after a backward"
        tail = next((rank["error"].splitlines() for rank in ranks if rank["error"]), lines)[-_TAIL:]
        shown = "".join(f"\n  {line}" for line in tail)
        raise ConfigurationError(f"{cell.name} could not run: {why}. Its last output:{shown}")
    warnings = dict.fromkeys(re.findall(r"\w*Warning: .*", "\n".join(lines)))
    found = {"cell": cell.name, "steps": steps, "seconds": time.monotonic() - began, "warnings": [*warnings]}
    return found | {"ranks": ranks, "format": _FORMAT}


def _where(folder: Path, size: int) -> list[str]:
    """Return in which line each rank is now."""
    from ..observation.dump import threads_in  # imports torch

    files = {int(file.name.split("-")[1]): file for file in folder.glob("stacks-*")}
    for file in files.values():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(file.name.split("-")[2]), _STACKS_SIGNAL)
    deadline, places = time.monotonic() + _STACKS_SECONDS, dict[int, str]()
    while len(places) < len(files) and time.monotonic() < deadline:
        for rank, file in files.items():
            for _, line, stack in threads_in(file.read_text()):
                if line is not None and any(place[0].endswith("parity/recorder.py") for place in stack):
                    places[rank] = shown_place(line)
        time.sleep(0.02)  # no event tells that a process has written its file
    absent = "it has not begun the script, has ended, or is stopped"
    return [f"rank {rank}: {places.get(rank, absent)}" for rank in range(size)]


def _report(left: Record, right: Record, result: Comparison, tolerance: float) -> Iterator[str]:
    for side, record in (("left ", left), ("right", right)):
        head = record["ranks"][0]
        versions = f"torch {head['torch']}, {head['threads']} threads, {record['seconds']:.1f} s"
        yield f"{side} {record['cell']}: {len(record['ranks'])} processes, {head['steps']} steps, {versions}"
    first, least, cause, number = result.first, result.least, result.cause, len(result.losses)
    if first is not None:
        yield f"different: {_place(first)}"
    elif least is None:
        yield f"equal: {number} steps are equal bit for bit"
    else:
        kind = "equal" if result.largest <= tolerance else "only rounding"
        yield f"{kind}: {number} steps differ by {result.largest:.1e} at most (--tolerance {tolerance:g})"
    if least is not None and least != first:
        yield f"the first difference in any bit: {_place(least)}"
        error = max(rank["summing_error"] for record in (left, right) for rank in record["ranks"])
        yield f"for comparison: adding the numbers of a gradient in another order changes their sum by {error:.1e}"
    if cause is not None:
        yield f"cause: {cause.text}"
        yield f"remedy: {cause.remedy}"
    for note in result.notes:
        yield f"note: {note}"
    for side, record in (("left", left), ("right", right)):
        for warning in record["warnings"][:_WARNINGS]:
            yield f"warning of the {side}: {warning}"
    shown = {0, number - 1, first.step - result.begin if first else 0} & set(range(number))
    yield "step  loss left      loss right     weights differ by"
    for step in sorted(shown):
        losses = ("-" if loss is None else f"{loss:.8g}" for loss in result.losses[step])
        yield f"{step + result.begin:4}  {'  '.join(f'{loss:13}' for loss in losses)}  {result.sizes[step]:.1e}"


def _place(found: Difference) -> str:
    name = f" {'' if found.stage == 'settings of the optimizer' else 'of '}{found.name}" if found.name else ""
    where = "before the first step" if found.step < 0 else f"step {found.step}"
    size = f", relative difference {found.size:.1e}" if math.isfinite(found.size) else ""
    return f"{where}, rank {found.rank}, {found.stage}{name}{size}"


def _as_json(left: Record, right: Record, result: Comparison, tolerance: float) -> Any:
    is_equal = result.first is None and result.largest <= tolerance
    found = {"equal": is_equal, "tolerance": tolerance, **dataclasses.asdict(result)}
    for side, record in (("left", left), ("right", right)):
        values = record | record["ranks"][0]
        found[side] = {name: values[name] for name in ("cell", "seconds", "torch", "threads", "device")}
    # JSON has no infinities: they become null.
    return json.loads(json.dumps(found), parse_constant=lambda _: None)


def _draw(figure: Any, left: Record, right: Record, result: Comparison) -> None:
    losses, differences = figure.subplots(2, 1, sharex=True)
    for number, record in enumerate((left, right)):
        values = [math.nan if pair[number] is None else pair[number] for pair in result.losses]
        losses.plot(values, label=record["cell"], linestyle=("-", "--")[number])
    losses.set(ylabel="mean loss")
    losses.legend()
    differences.plot([size or math.nan for size in result.sizes], marker=".")
    differences.set(xlabel="step", ylabel="largest relative difference of a weight", yscale="log")
