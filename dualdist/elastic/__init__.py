"""Training that goes on after a failed collective, from the last commit, with Horovod's API (horovod/torch/elastic).

When a collective fails while all processes live (a mismatch, a failed call), every rank goes back to the last commit,
joins the world anew, and calls the function again, on every engine and under every launcher. Hosts may come and go and
processes may die when `horovodrun --host-discovery-script` has started the job and Horovod is the engine: it then forms
the new world from those that live.

Not supported yet: under other launchers and on the torch engine, a process that has died takes the job with it.
torchrun then restarts all processes, and a commit does not outlive its process: load a checkpoint.
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
