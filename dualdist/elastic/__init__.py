"""Training that continues from the last commit after a failed collective, with Horovod's API (horovod/torch/elastic).

When a collective fails but no process dies (a mismatch, a failed call), every rank returns to the last commit,
joins the world again, and calls the function again. This works on every backend and under every launcher. What
happens when processes die, or hosts are added or removed, depends on the launcher. The script does not change:

horovodrun --host-discovery-script, Horovod as the backend: the surviving processes keep their memory, and form the new
world with those that horovodrun starts.

torchrun --max-restarts, either backend: torchrun ends all processes and starts new ones. So `commit` also writes a file
before it returns on any rank, one per node, in the format of dualdist.checkpoint. At the start, `run` finds the newest
commit of all nodes, sends it to all ranks, calls the reset callbacks, and calls the function. The files are in a folder
under the temporary folder that belongs to the node's torchrun, or in DUALDIST_ELASTIC_DIR. The latter must be a folder
of this job alone: a job that finds commits there continues from them. With --nnodes MIN:MAX but without
--max-restarts, torchrun's processes cannot see that it restarts them: set DUALDIST_ELASTIC_DIR.

Not supported: under other launchers, and on the torch backend under horovodrun, a process that dies ends the whole job.
Load a checkpoint then.
"""

from __future__ import annotations

from ..errors import HostsUpdatedInterrupt
from . import state
from .loop import run, run_fn
from .state import (
    ElasticSampler,
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
