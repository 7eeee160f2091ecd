"""The state of the random number generators of this process: Python's, NumPy's and torch's."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

__all__ = ("RandomState",)


class RandomState:
    """Python's `random`, NumPy's and torch's global generators, with that of the GPU this process uses.

    Every rank saves its own and gets its own back. In a larger world, a rank beyond those that saved gets a seed that
    follows from the state of rank `rank % saved` and its own rank: never the numbers of another rank, and the same
    whenever this checkpoint is loaded. In a smaller one the states of the ranks that are gone are not used.

    `iter(DataLoader(...))` draws one number from torch's generator, unless the loader has a `generator=` of its own:
    give it one, or resuming in the middle of an epoch draws it once more than the run that was never interrupted.
    """

    per_rank = True
    """Tells `dualdist.checkpoint` to save the state of every rank; any object may have this and `load_derived`."""

    def state_dict(self) -> dict[str, Any]:
        """Return this process's state, in values that `torch.load(weights_only=True)` takes."""
        kind, keys, *rest = np.random.get_state(legacy=True)
        state = {
            "python": random.getstate(),
            "numpy": (str(kind), torch.from_numpy(keys.astype(np.int64)), *rest),  # type: ignore[union-attr]
            "torch": torch.get_rng_state(),
        }
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            state["cuda"] = torch.cuda.get_rng_state()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state`. A GPU whose generator was not saved gets a seed that follows from torch's."""
        random.setstate(state["python"])
        kind, keys, *rest = state["numpy"]
        np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
        torch.set_rng_state(state["torch"].clone())
        if torch.cuda.is_available():
            if "cuda" in state:
                torch.cuda.set_rng_state(state["cuda"].clone())
            else:
                torch.cuda.manual_seed(_seed(state, 0))

    def load_derived(self, states: Sequence[dict[str, Any]], rank: int) -> None:
        """Seed a rank that none of `states` belongs to."""
        seed = _seed(states[rank % len(states)], rank)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed)


def _seed(state: dict[str, Any], rank: int) -> int:
    data = state["torch"].numpy().tobytes() + repr(state["python"]).encode() + rank.to_bytes(8, "little")
    return int.from_bytes(hashlib.sha256(data).digest()[:7], "little")
