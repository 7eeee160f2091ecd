"""The states of the random number generators of this process: those of Python, NumPy and torch."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ... import accelerator
from ...checks import mapping

__all__ = ("RandomState",)


class RandomState:
    """The global generators of Python's `random`, NumPy and torch, and that of this process's accelerator.

    Every rank saves its own state and loads it again. In a larger world, a rank without a saved state is seeded from
    the state of rank `rank % saved` and its own rank. Its numbers then differ from every other rank's, and are the same
    each time this checkpoint is loaded. In a smaller world, the states of the missing ranks are not used.

    `iter(DataLoader(...))` draws one number from torch's generator, unless the loader has its own `generator=`. Give it
    one: otherwise a run that resumes inside an epoch draws one number more than a run without interruption.
    """

    per_rank = True
    """Makes `dualdist.checkpoint` save the state of every rank. Any object may have this and `load_derived`."""

    def state_dict(self) -> dict[str, Any]:
        """Return this process's state, in values that `torch.load(weights_only=True)` accepts."""
        kind, keys, *rest = np.random.get_state(legacy=True)
        state = {
            "python": random.getstate(),
            "numpy": (str(kind), torch.from_numpy(keys.astype(np.int64)), *rest),  # type: ignore[union-attr]
            "torch": torch.get_rng_state(),
        }
        if accelerator.is_started():
            state[str(accelerator.kind())] = accelerator.get_rng_state()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`. An accelerator's generator without a saved state is seeded from torch's state."""
        mapping("state", state, "python", "numpy", "torch", fix="Pass what state_dict() has returned.")
        random.setstate(state["python"])
        name, keys, *rest = state["numpy"]
        np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
        torch.set_rng_state(state["torch"].clone())
        kind = accelerator.kind()
        if kind in state:
            accelerator.set_rng_state(state[kind].clone())
        elif kind is not None:
            accelerator.manual_seed(_seed(state, 0))

    def load_derived(self, states: Sequence[dict[str, Any]], rank: int) -> None:
        """Seed a rank that has no state in `states`."""
        seed = _seed(states[rank % len(states)], rank)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed)


def _seed(state: dict[str, Any], rank: int) -> int:
    data = state["torch"].numpy().tobytes() + repr(state["python"]).encode() + rank.to_bytes(8, "little")
    return int.from_bytes(hashlib.sha256(data).digest()[:7], "little")
