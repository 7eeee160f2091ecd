"""Which gradients the ranks contribute to a reduction, and what each rank knows of the others' contributions.

Each rank knows on the host which gradients it has. The ranks exchange this only when some rank contributes other
gradients than at the last exchange. A regular step therefore needs no exchange, and the host reads nothing of a GPU.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from ..backends.base import Group
from ..types import Max

__all__ = ("DENSE", "NOTHING", "SPARSE", "Contributions")

NOTHING, DENSE, SPARSE = 0, 1, 2
"""The kinds of contribution to one gradient; DENSE | SPARSE when the ranks contribute both."""


class Contributions:
    """The kinds of contribution to all gradients: those of this rank, and those of all ranks combined.

    Kinds are bytes, one for each gradient, in the order of the buckets. Between two exchanges, the combined kinds are
    those of the last exchange; before the first one, every rank contributes the expected kinds.
    """

    def __init__(self, expected: Sequence[bytes]) -> None:
        """expected: for each bucket the kinds that a rank contributes when it has all gradients; equal on all ranks."""
        self._expected = b"".join(expected)
        self._ends = list(itertools.accumulate(map(len, expected)))
        self._announced: bytes | None = self._expected
        """What this rank contributed at the last exchange; None after an exchange in which it had joined."""
        self._is_complete = True
        """Whether every member that had not joined contributed the expected kinds at the last exchange."""
        self.combined = list(expected)
        """For each bucket, the kinds that the ranks contribute."""

    def changed(self, kinds: Sequence[bytes]) -> bool:
        """Return whether this rank contributes other kinds than at the last exchange. kinds: of each bucket."""
        return b"".join(kinds) != self._announced

    def must_exchange(self, any_changed: bool, any_joined: bool) -> bool:
        """Return whether the members must exchange their kinds; the same on all members for equal arguments."""
        return any_changed or (any_joined and not self._is_complete)

    def exchange(self, group: Group, kinds: Sequence[bytes] | None) -> None:
        """Combine the kinds of all members. Collective over `group`. kinds: of each bucket; None: it has joined."""
        count = len(self._expected)
        own = bytes(count) if kinds is None else b"".join(kinds)
        is_incomplete = kinds is not None and own != self._expected
        flags = [kind & bit != 0 for bit in (DENSE, SPARSE) for kind in own]
        sent = torch.tensor(
            [*flags, is_incomplete], dtype=torch.int32
        )  # on the CPU, whatever the gradients' device
        group.allreduce_(sent, Max).wait()
        *received, any_incomplete = sent.tolist()
        combined = bytes(
            dense * DENSE | sparse * SPARSE
            for dense, sparse in zip(received[:count], received[count:], strict=True)
        )
        self.combined = [combined[start:end] for start, end in itertools.pairwise([0, *self._ends])]
        self._announced = None if kinds is None else own
        self._is_complete = not any_incomplete
