"""Draws a fault from a seed: what happens to which rank of which world, and when."""

from __future__ import annotations

import json
import random
from dataclasses import asdict, dataclass, replace

STEPS = 6
"""Training steps of a run."""

START, INIT, CALL, BACKWARD, SAVE, SHUTDOWN = (
    "before init",
    "during init",
    "in a collective",
    "in backward",
    "while saving",
    "at shutdown",
)
PLACES = {START: 0.0, INIT: 0.6, CALL: 0.02, BACKWARD: 0.01, SAVE: 0.01, SHUTDOWN: 0.1}
"""Where a fault happens -> after how many seconds there at the latest."""

DEATHS = ("SIGKILL", "SIGTERM", "exception", "sys.exit")
ENDINGS = (*DEATHS, "SIGSTOP")
"""Faults that end or stop one rank."""
OTHERS = tuple(
    "wrong arguments,fork,signal handler,damaged checkpoint,hostile connections,all killed,full disk,threads".split(",")
)

CUT, SLOW = LINKS = ("cut links", "slow links")
"""Faults of the links between two hosts."""

DIRECT = ("torch", "horovod")
"""Worlds without a launcher: nothing ends the other ranks when one has died, so each must notice it."""
LAUNCHED = ("run", "torch-gloo", "torch-mpi", "horovod-gloo", "horovod-mpi")


@dataclass(frozen=True)
class Fault:
    """What happens in one run."""

    seed: int
    world: str
    size: int
    method: str
    """How the processes of a direct world meet: "file" or "tcp"."""
    kind: str
    place: str
    rank: int
    step: int
    seconds: float
    """After how many seconds at the place."""
    stays: bool
    """Whether the other ranks stay until each has its error."""
    asynchronous: bool
    """Whether checkpoints are saved in the background."""
    hosts: int = 1
    """Number of hosts. In a direct world, rank r runs on host r % hosts."""

    def __str__(self) -> str:
        where = f"{self.place}{f' of step {self.step}' if self.place in (CALL, BACKWARD, SAVE) else ''}"
        hosts = f", {self.hosts} hosts" if self.hosts > 1 else ""
        meeting = f" ({self.method}{hosts})" if self.world in DIRECT else ""
        return f"{self.kind} on rank {self.rank} of {self.size} {where} + {self.seconds:.3f} s, {self.world}{meeting}"

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Fault:
        return cls(**json.loads(text))


def draw(seed: int) -> Fault:
    """Return the fault of `seed`: the same for each call."""
    numbers = random.Random(seed)
    world = numbers.choice(DIRECT if numbers.random() < 0.75 else LAUNCHED)
    size = numbers.choice((2, 3, 3, 4))
    kind = numbers.choice(ENDINGS if numbers.random() < 0.65 else OTHERS)
    place = numbers.choice(list(PLACES) if kind in ENDINGS else [CALL, BACKWARD, SAVE])
    fault = Fault(
        seed,
        world,
        size,
        numbers.choice(("file", "tcp")),
        kind,
        place,
        numbers.randrange(size),
        numbers.randrange(STEPS),
        numbers.uniform(0, PLACES[place]),
        stays=numbers.random() < 0.5,
        asynchronous=numbers.random() < 0.5,
    )
    if numbers.random() >= 0.1:
        return fault
    place = numbers.choice([CALL, BACKWARD, SAVE])
    return replace(
        fault,
        world=numbers.choice(DIRECT),
        method="tcp",
        kind=numbers.choice(LINKS),
        place=place,
        seconds=numbers.uniform(0, PLACES[place]),
        hosts=2,
    )
