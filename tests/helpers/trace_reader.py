"""Reading a Chrome trace as a viewer does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_spans(path: Path) -> dict[str, list[str]]:
    """Return what each process of the trace did: its spans in order, nested ones as outer/inner, marks in brackets.

    Raises AssertionError unless every span is closed and time goes forward on each thread.
    """
    names: dict[int, str] = {}
    spans: dict[str, list[str]] = {}
    stacks: dict[tuple[int, int], list[str]] = {}
    clocks: dict[tuple[int, int], int] = {}
    for event in _read(path):
        if event["ph"] == "M" and event["name"] == "process_name":
            names[event["pid"]] = event["args"].get("name", "")
        if event["ph"] not in "BEX":
            continue
        thread = event["pid"], event["tid"]
        stack = stacks.setdefault(thread, [])
        assert event["ts"] >= clocks.get(thread, 0), f"{event} goes back in time"
        clocks[thread] = event["ts"]
        if event["ph"] == "E":
            stack.pop()
            continue
        mark = event["ph"] == "X"
        stack.append(event["name"])
        spans.setdefault(names[event["pid"]], []).append(f"[{event['name']}]" if mark else "/".join(stack))
        if mark:
            stack.pop()
    assert not any(stacks.values()), f"{stacks} are left open"
    return spans


def read_marks(path: Path) -> list[str]:
    """Return the marks that go across all processes."""
    return [event["name"] for event in _read(path) if event["ph"] == "i"]


def _read(path: Path) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = json.loads(path.read_text())
    return events
