"""One process of a contestant: calls collectives, and writes what a call costs into FOLDER/RANK.json.

python collectives_worker.py FOLDER CONTESTANT COLLECTIVE,... BYTES,...    # started by rounds.py
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path

import torch
from callers import CALLERS, Call

_WARM_UP_CALLS = 5
_MOST_BYTES, _MOST_CALLS, _LEAST_CALLS = 1 << 29, 300, 5
"""How much one collective of one size transfers, and how often it is called."""


def main() -> None:
    folder, contestant, collectives, sizes = sys.argv[1:]
    torch.set_num_threads(1)
    caller = CALLERS[contestant].join()
    figures = {}
    for size in map(int, sizes.split(",")):
        tensor = torch.zeros(max(1, size // 4 // caller.size) * caller.size)
        for name in collectives.split(","):
            figures[f"{name} {size}"] = _milliseconds(caller.calls[name], tensor)
    Path(folder, f"{caller.rank}.json").write_text(json.dumps(figures))
    caller.leave()


def _milliseconds(call: Call, tensor: torch.Tensor) -> float:
    """Return the median of the wall times of a call."""
    calls = max(_LEAST_CALLS, min(_MOST_CALLS, _MOST_BYTES // (4 * tensor.numel())))
    taken = []
    for number in range(_WARM_UP_CALLS + calls):
        began = time.perf_counter()
        call(tensor)
        if number >= _WARM_UP_CALLS:
            taken.append(1e3 * (time.perf_counter() - began))
    return statistics.median(taken)


if __name__ == "__main__":
    main()
