"""Prints a table of the tests of GPUs, and writes it as JSON."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print test, result and figure. DUALDIST_GPU_REPORT: the file for the JSON."""
    path = os.environ.get("DUALDIST_GPU_REPORT")
    if not path:
        return
    rows = []
    for result in ("passed", "failed", "error", "skipped"):
        for report in terminalreporter.stats.get(result, []):
            if "tests/gpu/" in report.nodeid.replace(os.sep, "/"):
                figure = dict(report.user_properties).get("figure", f"{report.duration:.1f} s")
                rows.append({"test": report.nodeid.partition("::")[2], "result": result, "figure": figure})
    for row in rows:
        terminalreporter.write_line(f"{row['result']:8} {row['figure']!s:>12}  {row['test']}")
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    Path(path).write_text(json.dumps({"torch": torch.__version__, "device": device, "tests": rows}, indent=2))
    if device is None:
        terminalreporter.write_line(f"ci/gpu needs a device: torch {torch.__version__} sees no GPU here.")
    terminalreporter.write_line(f"Written to {path}.")
