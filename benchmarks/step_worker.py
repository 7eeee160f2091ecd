"""One process of a contestant: trains models, and writes what a step costs into FOLDER/RANK.json.

python step_worker.py FOLDER CONTESTANT HOOK MODEL [MODEL ...]     # started by rounds.py
"""

from __future__ import annotations

import gc
import json
import re
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from hooks import HOOKS
from models import MODELS, Model
from trainers import TRAINERS, Member

_WARM_UP_STEPS = 5
"""The first steps find the order of the gradients and allocate memory."""


def main() -> None:
    folder, contestant, hook, *names = sys.argv[1:]
    torch.set_num_threads(1)
    began = time.perf_counter()
    member = TRAINERS[contestant].join()
    figures = {"init s": time.perf_counter() - began}
    for name in names:
        figures |= {f"{name} {what}": value for what, value in _measured(member, MODELS[name], HOOKS[hook]).items()}
        gc.collect()
    Path(folder, f"{member.rank}.json").write_text(json.dumps(figures))
    member.leave()


def _measured(member: Member, model: Model, hook: Any) -> dict[str, float]:
    """Return the medians over the steps of their wall and CPU times (user and system, all threads), and the memory."""
    torch.manual_seed(0)
    network, batch = model.make()
    wrapped = member.wrap(network, hook)
    wall, cpu = [], []
    for number in range(_WARM_UP_STEPS + model.steps):
        wall_began, cpu_began = time.perf_counter(), time.process_time()
        wrapped.optimizer.zero_grad()
        wrapped.backward(wrapped.model(batch).square().mean())
        wrapped.optimizer.step()
        if number >= _WARM_UP_STEPS:
            wall.append(1e3 * (time.perf_counter() - wall_began))
            cpu.append(1e3 * (time.process_time() - cpu_began))
    # While the model's shared memory is still mapped.
    return {"ms": statistics.median(wall), "CPU ms": statistics.median(cpu), "peak MB": peak_megabytes()}


def peak_megabytes() -> float:
    """Return the greatest resident memory so far. Of shared memory with several users, each has an equal part."""
    status, rollup = Path("/proc/self/status").read_text(), Path("/proc/self/smaps_rollup").read_text()
    counted_whole, counted_in_parts = _kilobytes("RssShmem", status), _kilobytes("Pss_Shmem", rollup)
    return (_kilobytes("VmHWM", status) - counted_whole + counted_in_parts) / 1024


def _kilobytes(name: str, text: str) -> int:
    match = re.search(rf"^{name}:\s*(\d+) kB$", text, re.MULTILINE)
    assert match is not None, name
    return int(match[1])


if __name__ == "__main__":
    main()
