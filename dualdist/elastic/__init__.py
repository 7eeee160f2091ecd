"""Training that goes on after a failed collective, from the last commit, with Horovod's API (horovod/torch/elastic).

When a collective fails while all processes live (a mismatch, a failed call), every rank goes back to the last commit,
joins the world anew, and calls the function again, on every backend and under every launcher. When processes die, or
hosts come and go, it depends on the launcher; the script is the same:

horovodrun --host-discovery-script, Horovod as the backend: the processes that live keep their memory, and form the new
world with those that horovodrun starts.

torchrun --max-restarts, either backend: torchrun ends all processes and starts them anew, so `commit` also writes a
file before it returns on any rank, one per node, in the format of dualdist.checkpoint. `run` looks which commits the
nodes have, sends the newest to all, calls the reset callbacks, and calls the function. The files lie in a folder under
the temporary folder that belongs to the torchrun of the node, or in DUALDIST_ELASTIC_DIR. That must be a folder of this
job alone: a job that finds commits there goes on from them. With --nnodes MIN:MAX, but without --max-restarts, torchrun
tells its processes nothing of restarts: set DUALDIST_ELASTIC_DIR.

Not supported: under other launchers, and on the torch backend under horovodrun, a process that has died takes the job
with it. Load a checkpoint.
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
