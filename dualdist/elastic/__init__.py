"""Training that goes on after a failed collective, from the last commit, with Horovod's API (horovod/torch/elastic).

What works: when a collective fails while all processes live (a mismatch, a failed call, a stall that is over), every
rank goes back to the last commit, joins the world anew, and calls the function again. Started by
`horovodrun --host-discovery-script` with Horovod as the engine, also when hosts come and go or a process dies, since
Horovod itself then forms the new world.

What does not yet: under other launchers a process that has died is not replaced while the others live on. torchrun
restarts all processes instead, and a commit does not outlive its process.
"""

from __future__ import annotations

from . import state
from .loop import run, run_fn
from .sampler import ElasticSampler
from .state import (
    HostsUpdatedInterrupt,
    ModelStateHandler,
    ObjectState,
    OptimizerStateHandler,
    SamplerStateHandler,
    State,
    StateHandler,
    TorchState,
    get_handler_registry,
    set_handler_registry,
)

__all__ = (
    "ElasticSampler",
    "HostsUpdatedInterrupt",
    "ModelStateHandler",
    "ObjectState",
    "OptimizerStateHandler",
    "SamplerStateHandler",
    "State",
    "StateHandler",
    "TorchState",
    "get_handler_registry",
    "run",
    "run_fn",
    "set_handler_registry",
    "state",
)
