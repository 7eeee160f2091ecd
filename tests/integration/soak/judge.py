"""What is right after a fault.

Horovod itself may end a rank: its C++ threads do not catch Gloo's exceptions (horovod/common/operations.cc:697,
gloo/http_store.cc:96), and its Gloo takes a stranger's connection for a peer's. Then the process aborts with Gloo's
message, and that counts as right.
"""

from __future__ import annotations

import re
import signal

from .faults import CUT, DEATHS, DIRECT, ENDINGS, INIT, SHUTDOWN, SLOW, START, Fault
from .world import Outcome

SOON, LATE = 6.0, 35.0
"""Seconds until all ranks have noticed a death, and until they have given up one that does not answer."""
HOROVODS = ("gloo::IoException", "gloo::EnforceNotMet", "HTTP request failed")
OWN = {"wrong arguments": 30.0, "damaged checkpoint": 60.0, "hostile connections": 60.0, "fork": 30.0, SLOW: 60.0}
TRAINED = (*OWN, "full disk", "threads", "none")
"""Faults that no rank may notice in its training."""


def allowed_seconds(fault: Fault) -> float:
    """Return how long the ranks may take to report after the fault."""
    if fault.kind in ("SIGSTOP", CUT) or fault.place in (START, INIT) or fault.world.startswith("horovod"):
        return LATE
    return 15.0 if fault.kind in ENDINGS else OWN.get(fault.kind, 30.0)


def faults_of(fault: Fault, outcome: Outcome) -> list[str]:
    """Return what is wrong about the outcome; nothing if it is right."""
    wrong = [f"left behind: {thing}" for thing in outcome.left]
    if not outcome.ended:
        wrong.append(f"no end: {fault.size - len(outcome.reports)} ranks have not reported in time")
    is_horovods = fault.world.startswith("horovod") and any(text in outcome.output for text in HOROVODS)
    kinds = {kind for kind, _, _ in outcome.others.values()}
    # A rank is known to the others when it has arrived.
    texts = " ".join(text for _, text, _ in outcome.others.values())
    # Horovod's launchers start no meeting: its own start waits for a rank of which it knows nothing.
    not_arrived = ("did not arrive", "could not reach the server", "for another rank in Horovod")
    has_arrived = not any(text in texts for text in not_arrived)
    for kind, text, when in outcome.others.values():
        is_known = fault.kind in DEATHS and has_arrived and not is_horovods
        if is_known and outcome.struck and when > outcome.struck + SOON and fault.place == INIT:
            wrong.append(f"noticed after {when - outcome.struck:.0f} s: {text}")
        if kind == "other":
            wrong.append(f"not an error of the package: {text}")
        if kind == "ended" and fault.world in DIRECT and fault.kind != "all killed" and not is_horovods:
            wrong.append("a rank ended without a report")
        if kind == "error" and fault.kind == CUT and not re.search(r"\brank", text):
            wrong.append(f"names no rank: {text}")
        if kind == "error" and fault.kind in ENDINGS and not names(text, fault, is_horovods):
            wrong.append(f"does not name rank {fault.rank}: {text}")
    if fault.kind in TRAINED:
        kinds |= {kind for kind, _, _ in outcome.reports.values()}
        is_attacked = is_horovods and fault.kind == "hostile connections"
        if not is_attacked and (kinds != {"done"} or any(outcome.codes)):
            wrong.append(f"must train to the end, but {sorted(outcome.reports.values())}, codes {outcome.codes}")
    if "preempted" in kinds and kinds - {"preempted", "done"}:
        wrong.append(f"must all be preempted, but {sorted(outcome.reports.values())}")
    if fault.world in DIRECT and fault.kind != "all killed":
        known = (0, 1, 3, 75, -signal.SIGKILL, -signal.SIGTERM, *[-signal.SIGABRT] * is_horovods)
        odd = [code for code in outcome.codes if code not in known]
        if odd:
            wrong.append(f"exit codes {outcome.codes}")
    return wrong


def names(text: str, fault: Fault, is_horovods: bool = False) -> bool:
    """Return whether an error names the rank of the fault and, while all others live, no other.

    is_horovods: whether Horovod has ended other ranks.
    """
    if fault.world.startswith("horovod-") and fault.place in (START, INIT):  # no rank knows another one yet
        return True
    if text.startswith("CheckpointError") and f"Rank {fault.rank} failed" in text:
        return True
    missing = re.search(r"missing ranks: \[([\d, ]*)\]", text)
    if missing is None:
        missing = re.search(
            r"ranks? (\d[\d, ]*)(?: of \[[\d, ]*\])?(?:,? which did not arrive| did not arrive| ha(?:s|ve) ended|:)",
            text,
        )
    if missing is None:
        return fault.rank == 0 and "rank 0" in text
    gone = re.findall(r"^  ranks? ([\d, ]+): (?:process ended|no answer:|interrupted)", text, re.MULTILINE)
    alone = fault.stays and fault.place not in (START, INIT, SHUTDOWN) and not is_horovods
    if alone and gone and {rank for row in gone for rank in _numbers(row)} != {fault.rank}:
        return False
    return fault.rank in _numbers(missing[1])


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.replace(" ", "").split(",") if number]
