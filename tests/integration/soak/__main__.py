"""Repeats random faults. See ci/soak.

python -m tests.integration.soak MINUTES [--seed N]
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from ...accelerator import missing
from ...helpers.forks import use_forks
from .faults import CUT, ENDINGS, Fault, draw
from .judge import allowed_seconds, faults_of
from .programs import run_programs
from .world import Outcome, run_world


def run_one(fault: Fault, folder: Path) -> tuple[list[str], Outcome]:
    """Run a fault, and a second time without it if the first run did not finish. Return what is wrong."""
    outcome = run_world(fault, folder, allowed_seconds(fault))
    wrong = faults_of(fault, outcome)
    if wrong or fault.kind not in (*ENDINGS, CUT, "all killed"):
        return wrong, outcome
    resumed = dataclasses.replace(fault, kind="none")
    second = run_world(resumed, folder, 0.0)
    return [f"resumed: {text}" for text in faults_of(resumed, second)], second if any(second.codes) else outcome


PROGRAMS = 10
"""Each seed that this divides runs random programs on the simulated accelerator, and no fault."""


def report(seed: int, what: object, wrong: list[str], output: str = "") -> None:
    print(f"{'WRONG' if wrong else 'ok'} --seed {seed}: {what}", flush=True)
    if wrong:
        print(*(f"    {line}" for text in wrong for line in text.splitlines()), sep="\n")
        print(*(f"    | {line}" for line in output.splitlines()[-60:]), sep="\n", flush=True)


def run_seed(seed: int) -> tuple[str, bool]:
    """Run what a seed stands for. Return its kind, and whether something is wrong."""
    if seed % PROGRAMS == 0 and missing() is None:
        what, wrong = run_programs(seed)
        report(seed, what, wrong)
        return "programs", bool(wrong)
    fault = draw(seed)
    if fault.hosts > 1 and os.geteuid() != 0:
        fault = dataclasses.replace(fault, kind="none", hosts=1)  # only root can make hosts and cut links
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        wrong, outcome = run_one(fault, Path(folder))
    report(seed, f"{fault}: {shown(outcome)}", wrong, outcome.output)
    return fault.kind, bool(wrong)


def shown(outcome: Outcome) -> str:
    """Return what the ranks reported, and when."""
    kinds = Counter(kind for kind, _, _ in outcome.others.values())
    last = max((when for _, _, when in outcome.others.values()), default=0.0)
    seconds = f" after {last - outcome.struck:.1f} s" if outcome.struck else ""
    return ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items())) + seconds


def main() -> int:
    parser = argparse.ArgumentParser(prog="ci/soak", description="Repeats random faults in random worlds.")
    parser.add_argument("minutes", type=float, nargs="?", default=30.0, help="0: one fault")
    parser.add_argument("--seed", type=int, default=random.randrange(1_000_000), help="of the first fault")
    given = parser.parse_args()
    use_forks(True)
    deadline, counts = time.monotonic() + 60 * given.minutes, Counter[tuple[str, bool]]()
    seed = given.seed
    while True:
        counts[run_seed(seed)] += 1
        seed += 1
        if time.monotonic() >= deadline:
            break
    for kind in sorted({kind for kind, _ in counts}):
        print(f"{kind}: {counts[kind, False]} right, {counts[kind, True]} wrong")
    failed = sum(count for (_, is_wrong), count in counts.items() if is_wrong)
    print(f"{counts.total()} faults from --seed {given.seed}, {failed} ended wrongly")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
