"""Say which rank the others wait for, at which call, since when, and in which line it is.

dualdist hang FOLDER

FOLDER is named in the errors of the ranks, which write a file each when a call fails or stalls. SIGUSR2 to one rank
makes all ranks write theirs at any time. Copy the files of several hosts into one folder.
"""

from __future__ import annotations

import argparse
import json
import linecache
import pickle
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import ConfigurationError
from .status import call_of_torch

File = dict[str, Any]
Call = dict[str, Any]
"""What observation/dump.py writes of a rank and of a call."""

_SAME_TIME = 60 * 10**9
"""Files that ranks have written because of one failure have dates that differ by less, in nanoseconds."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `dualdist hang`."""
    parser.add_argument("folder", type=Path, help="has the files rank-N.json")
    parser.add_argument("--flight-recorder", type=Path, help="write files for `torchfrtrace` to this folder")


def execute(args: argparse.Namespace) -> int:
    """Print what the files say, and return 0. Raises ConfigurationError if there are none."""
    ranks = _read(args.folder)
    sys.stdout.writelines(f"{line}\n" for line in _report(ranks))
    if args.flight_recorder is not None:
        _write_traces(ranks, args.flight_recorder)
    return 0


def _read(folder: Path) -> dict[int, File]:
    """Return what each rank has written, without files of another world or much older ones than the newest."""
    files = [_file(path) for path in folder.glob("rank-*.json")]
    if not files:
        raise ConfigurationError(
            f"FOLDER must have files rank-N.json, but {folder} has none. Pass the folder that the error of a rank "
            "names, or send SIGUSR2 to a rank first."
        )
    newest = max(files, key=lambda file: int(file["asked"]))
    files = [file for file in files if file["world"] == newest["world"]]
    ranks = {file["rank"]: file for file in files if file["asked"] > newest["asked"] - _SAME_TIME}
    return {rank: ranks[rank] for rank in sorted(ranks)}


def _file(path: Path) -> File:
    """Return what a rank has written. Raises ConfigurationError unless the file alone makes a report and a trace."""
    try:
        file: File = json.loads(path.read_text())
        file["pending"] = _pending(file)
        _ = int(file["asked"]), file["world"], range(file["size"])[file["rank"]]
        _ = [*_report({file["rank"]: file})], [_entry(call, 0) for call in file["calls"]]
    except (OSError, ValueError, TypeError, LookupError, AttributeError, OverflowError) as error:
        raise ConfigurationError(
            f"FOLDER must have only files rank-N.json that ranks have written, but {path} is not one: {error!r}. Copy "
            "it again, or remove it."
        ) from None
    return file


def _pending(file: File) -> dict[str, list[Call]]:
    """Return the calls of each channel that have not ended, the oldest first, with their (probable) numbers."""
    found: dict[str, list[Call]] = defaultdict(list)
    for call in file["calls"]:
        if not call["ended"]:
            waiting = [other for other in found[call["channel"]] if not other["agreed"]]
            call["number"] = call["number"] or file["channels"][call["channel"]]["agreed"] + 1 + len(waiting)
            found[call["channel"]].append(call)
    return found


def _report(ranks: Mapping[int, File]) -> Iterator[str]:
    some = next(iter(ranks.values()))
    yield f"{len(ranks)} of {some['size']} ranks wrote a file at {_clock(some['time'])}: {some['why']}."
    for rank in sorted(set(range(some["size"])) - set(ranks)):
        states = {file.get("others", {}).get(str(rank)) for file in ranks.values()} - {"", None}
        unknown = "its process has ended or is stopped, keeps Python's global lock, or is on another host"
        why = states.pop() if len(states) == 1 else unknown
        yield f"Rank {rank} has no file of this time: {why}."
    behind = _behind(ranks, has_absent=len(ranks) < some["size"])
    for rank, (call, waiting) in behind.items():
        file = ranks[rank]
        yield f"Rank {rank} is behind, on {file['host']}, process {file['process']}. It is {_position(file)}"
        if call is None:
            yield f"  ranks {waiting} wait in torch.distributed"
        else:
            called = _moment(ranks[waiting[0]], call, "called")
            yield f"  ranks {waiting} wait for call {call['number']} of {call['channel']} since {called}"
        last = max(file["calls"], key=lambda made: int(made["ended"]), default={"ended": 0})
        if last["ended"]:
            yield f"  its last call ended at {_moment(file, last, 'ended')}"
    groups: dict[str, list[int]] = defaultdict(list)
    for rank, file in ranks.items():
        calls = [f"waiting in {calls[0]['kind']} of {channel}" for channel, calls in file["pending"].items()]
        calls += [f"waiting in torch.distributed ({function})"] if (function := _in_torch(file)) else []
        if calls or rank not in behind:
            groups[f"{', '.join(calls) or 'in no collective'}, {_position(file)}"].append(rank)
    for text, members in groups.items():
        yield f"Ranks {members}: {text}"


def _behind(ranks: Mapping[int, File], has_absent: bool) -> dict[int, tuple[Call | None, list[int]]]:
    """Return the ranks for which others wait: in which call (None: of torch.distributed), and which ranks."""
    found: dict[int, tuple[Call | None, list[int]]] = {}
    for waiting, file in ranks.items():
        for channel, (call, *_) in file["pending"].items():
            for rank in file["channels"][channel]["ranks"]:
                if rank in ranks and not _has_made(ranks[rank], call):
                    waiters = found.setdefault(rank, (call, []))[1]
                    if waiting not in waiters:
                        waiters.append(waiting)
    # A rank that waits, too, is behind only if nothing else explains it.
    outside = [rank for rank, file in ranks.items() if not file["pending"] and _in_torch(file)]
    if outside and not found:
        found = {rank: (None, outside) for rank in ranks if rank not in outside}
    idle = {rank: what for rank, what in found.items() if not ranks[rank]["pending"] and rank not in outside}
    if idle or has_absent:
        return idle
    most = max((len(waiting) for _, waiting in found.values()), default=0)
    return {rank: what for rank, what in found.items() if len(what[1]) == most}


def _has_made(file: File, call: Call) -> bool:
    """Return whether a rank has made `call` of another one, or need not make it, because one of them has joined."""
    own = [(made["kind"], made["name"]) for made in file["pending"].get(call["channel"], ())]
    agreed = file["channels"].get(call["channel"], {"agreed": 0})["agreed"]
    joins = call["kind"] == "join" or ("join", None) in own
    return joins or (call["kind"], call["name"]) in own or agreed >= call["number"]


def _in_torch(file: File) -> str:
    """Return the function of torch.distributed in which the main thread waits; "" if it is in none."""
    stacks = [thread["stack"] for thread in file["threads"] if thread["is_main"]]
    return call_of_torch(stacks[0]) if stacks else ""


def _position(file: File) -> str:
    """Return the line of the script in which the main thread is."""
    mains = [shown_place(thread["line"]) for thread in file["threads"] if thread["is_main"]]
    return mains[0] if mains else "in more threads than its file can have"


def shown_place(place: Sequence[Any] | None) -> str:
    """Return a line of a script, as (file, line, function), with its text."""
    name, number, function = place or ("?", 0, "no function of the script")
    return f"in {function} at {name}:{number}: {linecache.getline(name, number).strip()}"


def _moment(file: File, call: Call, what: str) -> str:
    """Return a time of a call by the clock of its rank, and the call."""
    ago = (file["time"] - call[what]) / 1e9
    return f"{_clock(call[what])} ({ago:.1f} s ago): {call['call']} at {':'.join(map(str, call['where']))}"


def _clock(moment: int) -> str:
    return time.strftime("%H:%M:%S", time.localtime(moment / 1e9))


# The format of torch's flight recorder (torch/distributed/flight_recorder/components/builder.py, build_collectives).

_NAMES = "all_reduce all_gather all_to_all reduce_scatter broadcast reduce gather scatter".split()
_OPERATIONS = {name.replace("_", "").upper(): name for name in _NAMES}
"""Event of a call -> its name there. All others exchange no tensors, as a barrier."""
_SAME_SIZES = ("ALLREDUCE", "BROADCAST", "REDUCE")
"""Events whose tensors have the same shape on all ranks, both before and after the call."""


def _write_traces(ranks: Mapping[int, File], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    # Ranks have forgotten their first calls. The analyser must not take those for calls that they have not made.
    first: dict[str, int] = {}
    for file in ranks.values():
        oldest = {call["channel"]: call["number"] for call in reversed(file["calls"]) if call["number"]}
        first |= {name: max(number, first.get(name, 1)) for name, number in oldest.items()}
    for rank, file in ranks.items():
        made = [call for call in file["calls"] if call["number"] >= first.get(call["channel"], 1)]
        calls = [call for call in made if call["kind"] != "join"]
        sets = {name: str(channel["ranks"]) for name, channel in file["channels"].items()}
        trace = {
            "version": "2.10",
            "pg_config": {name: {"name": name, "desc": name, "ranks": of} for name, of in sets.items()},
            "entries": [_entry(call, place) for place, call in enumerate(calls)],
        }
        (folder / f"rank_{rank}").write_bytes(pickle.dumps(trace))


def _entry(call: Call, place: int) -> dict[str, Any]:
    given, event, (file, line) = call["arguments"], call["event"], call["where"]
    sizes = (given.get("shapes") or [given.get("shape", [0])]) if event in _SAME_SIZES else [[0]]
    dtypes = given.get("dtypes") or [given.get("dtype", "")]
    return {
        "record_id": place,
        "process_group": (call["channel"], call["channel"]),
        "collective_seq_id": call["number"],
        "p2p_seq_id": 0,
        "is_p2p": False,
        # The only backend whose name the analyser of each release takes.
        "profiling_name": f"nccl:{_OPERATIONS.get(event, 'barrier')}",
        "state": "completed" if call["ended"] else "started" if call["agreed"] else "scheduled",
        "time_created_ns": call["called"],
        "time_discovered_started_ns": call["agreed"] or None,
        "time_discovered_completed_ns": call["ended"] or None,
        **{f"{what}_sizes": sizes for what in ("input", "output")},
        **{f"{what}_dtypes": dtypes for what in ("input", "output")},
        "frames": [{"name": call["call"], "filename": file, "line": line}],
    }
