"""Random programs on the streams of the simulated accelerator, as in tests/behaviours/test_streams.py."""

from __future__ import annotations

import random

from ...helpers.stream_programs import differences, program, training
from ...helpers.world import WORLDS, WorldFailure, started

COUNT = 20


def run_programs(seed: int) -> tuple[str, list[str]]:
    """Run programs and trainings in a world. Return what that is, and what is wrong."""
    draw = random.Random(seed)
    name = draw.choice([name for name in WORLDS if name.startswith("npu")])
    first = draw.randrange(1_000_000)
    wrong = []
    with started(*WORLDS[name]) as world:
        for run in (program, training):
            try:
                found = {place for own in world.run(differences, run, range(first, first + COUNT)) for place in own}
            except WorldFailure as error:
                found = set()
                wrong.append(str(error))
            if found:
                wrong.append(f"other numbers than on the CPU: {run.__name__} {sorted(found)}")
    return f"programs {first} to {first + COUNT - 1} in {name}", wrong
