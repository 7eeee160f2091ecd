"""A script for horovod.run: its functions and classes are sent to processes."""

from __future__ import annotations

import os
import sys
from typing import Any

import horovod
import horovod.torch as hvd
import torch


class Report:
    def __init__(self, *numbers: float) -> None:
        self.numbers = numbers


class ScriptError(Exception):
    """An exception that only this script has."""


def train(factor: float, *, fails: bool = False) -> Report:
    hvd.init()
    if fails:
        raise ScriptError(f"rank {hvd.rank()} failed")
    total = hvd.allreduce(torch.tensor([factor * (hvd.rank() + 1)]), op=hvd.Sum)
    return Report(hvd.rank(), hvd.size(), total.item())


def main(stack: str) -> None:
    options: dict[str, Any] = {"use_gloo": True, "executable": os.environ.get("PYTHON_EXEC")}  # of a fork; see forks.py
    reports = horovod.run(train, (2.0,), num_proc=2, **options)
    assert all(type(report) is Report for report in reports)
    print(stack, [report.numbers for report in reports], hvd.allreduce.__module__.partition(".")[0])
    if stack == "dualdist":  # Horovod itself raises a RuntimeError without the rank's exception
        try:
            horovod.run(train, (2.0,), {"fails": True}, num_proc=1, **options)
        except ScriptError as error:
            print(error, "Rank 0 of 1" in str(error.__cause__))


if __name__ == "__main__":
    main(sys.argv[1])
