"""Odd values for parameters, and which of them each parameter accepts, with the reason.

A name in a table is that of a parameter, or of a function and its parameter. The second kind wins.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

import dualdist as hvd


class Odd:
    """An object that has nothing."""


def _nested_tensor() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The PyTorch API of nested tensors is in prototype stage", UserWarning)
        return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])


ODD: Mapping[str, Callable[[], Any]] = MappingProxyType(
    {
        "none": lambda: None,
        "true": lambda: True,
        "whole": lambda: 7,
        "negative": lambda: -1,
        "huge": lambda: 10**30,
        "fraction": lambda: 1.5,
        "nan": lambda: math.nan,
        "infinite": lambda: math.inf,
        "text": lambda: "banana",
        "bytes": lambda: b"banana",
        "list": lambda: ["banana", "b", "c", "d"],
        "numbers": lambda: [1.5, 2.5, 3.5, 4.5],
        "dictionary": lambda: {"x": 1},
        "object": Odd,
        "class": lambda: Odd,
        "tensor": lambda: torch.ones(6),
    }
)
"""Wrong values for most parameters. 7 is no rank in the worlds of the tests, and six rows divide by their sizes."""

POSITIVE = "backward_passes_per_step bucket_cap_mb groups nprocs num_proc num_replicas passes start_timeout".split()
"""Numbers that must not be 0."""

MORE: Mapping[str, Mapping[str, Callable[[], Any]]] = MappingProxyType(
    {
        "tensor": {
            "sparse": lambda: torch.ones(6).to_sparse(),
            "without data": lambda: torch.ones(6, device="meta"),
            "nested": _nested_tensor,
        },
        "sparse_allreduce_async.tensor": {"sparse": lambda: torch.ones(6).to_sparse()},
        "process_group": {"unregistered": lambda: hvd.ProcessSet([0])},
        "process_set": {"unregistered": lambda: hvd.ProcessSet([0])},
        "splits": {
            "digits": lambda: "22",
            "other integers": lambda: torch.ones(hvd.size(), dtype=torch.int64),
            "too many": lambda: [1] * (hvd.size() + 1),
            "negative rows": lambda: [-1] * hvd.size(),
            "too many rows": lambda: [100] * hvd.size(),
        },
        "alltoall.tensor": {"number": lambda: torch.tensor(1.0)},
        "tensors": {"no tensor": list},
        "root_rank": {"size": hvd.size},
        "gradient": {"maximum": lambda: hvd.Max},
        "op": {
            "float": lambda: 1.0,
            "next": lambda: 6,
            "number": lambda: torch.tensor(1),
            "name": lambda: "sum",
            "bits": lambda: torch.distributed.ReduceOp.BAND,
            "factor": lambda: torch.distributed.ReduceOp.PREMUL_SUM,
        },
        "add_process_set.process_set": {
            "outside": lambda: [hvd.size()],
            "twice": lambda: [0, 0],
            "nobody": list,
            "negative rank": lambda: [-1],
        },
        "lr.warmup.factor": {"zero": lambda: 0, "half": lambda: 0.5},
        "rank": {"size": hvd.size},
        **{name: {"zero": lambda: 0} for name in POSITIVE},
        "ranks_or_comm": {"twice": lambda: [0, 0], "negative rank": lambda: [-1]},
    }
)
"""More wrong values for some parameters."""


@dataclass(frozen=True)
class Accepted:
    """Odd values that a parameter accepts."""

    names: frozenset[str]
    called: bool
    """Whether the test calls the function with them, or leaves them out, since that would take too long."""


def accept(names: str, reason: str, *, called: bool = True) -> Accepted:
    """Return the entry for the odd values in `names`, or for "all". reason: for the reader of the table."""
    return Accepted(frozenset(ODD if names == "all" else names.split()), called)


ELASTIC = "min_num_proc max_num_proc min_np max_np slots reset_limit cooldown_range host_discovery_script".split()
"""Parameters of horovod.run for elastic jobs."""

NUMBERS = "whole negative huge fraction"
FLAGS = (
    "shuffle drop_last pad sparse_as_dense init_sync divide_by_initial_world_size throw_on_early_termination enable "
    "affine track_running_stats mark_cycles strict partial asynchronous random_state sharded"
)
UNUSED = (
    "output_device dim find_unused_parameters check_reduction gradient_as_bucket_view static_graph "
    "skip_all_reduce_unused_params batched_grad_copy lazy_bucket_allocation"
)
LATER = (
    "SyncBatchNorm.process_set metrics.Mean.process_set metrics.Sum.process_set metrics.ConfusionMatrix.process_set "
    "SyncBatchNorm.convert_sync_batchnorm.process_set"
)

ACCEPTED: Mapping[str, Accepted] = MappingProxyType(
    {
        **dict.fromkeys(FLAGS.split(), accept("true", "a flag")),
        **dict.fromkeys(UNUSED.split(), accept("all", "without effect")),
        **dict.fromkeys(LATER.split(), accept("unregistered", "it may be registered later")),
        "tensor": accept("tensor", "a tensor"),
        "sparse_allreduce_async.tensor": accept("sparse", "a sparse tensor"),
        "name": accept("none text", "a name is optional, and any text"),
        "average": accept("none true text", "deprecated, but as in Horovod; a name in its place is true"),
        **{
            f"{group}allreduce{form}.op": accept("none", "Average, the default")
            for group in ("", "grouped_")
            for form in ("", "_", "_async", "_async_")
        },
        "prescale_factor": accept(NUMBERS, "any finite factor"),
        "postscale_factor": accept(NUMBERS, "any finite factor"),
        "splits": accept("none", "equal shares"),
        "obj": accept("all", "any object can be sent"),
        "device": accept("whole huge negative", "without effect: any number of a GPU, or -1"),
        "dataset": accept("text bytes list numbers dictionary tensor", "anything with a length"),
        "sampler": accept("text bytes list numbers dictionary tensor", "any iterable"),
        "iterable": accept("text bytes list numbers dictionary tensor", "any iterable"),
        "num_replicas": accept("none whole huge", "any number of ranks"),
        "rank": accept("none", "this rank"),
        "seed": accept("whole negative", "any number that torch accepts as a seed"),
        "seed_everything.seed": accept("whole", "a seed that NumPy accepts, too"),
        "rank_offset": accept("true whole", "True is 1"),
        "epoch": accept("whole", "an epoch"),
        "batch_idx": accept("whole huge", "not used, as in Horovod"),
        "batch_size": accept("whole huge", "any number of samples"),
        "optimizer": accept("", "an optimizer"),
        "model": accept("all", "without effect, as in Horovod"),
        "named_parameters": accept("none", "numbers instead of names"),
        "backward_passes_per_step": accept("whole huge", "any number of passes"),
        "passes": accept("whole huge", "any number of passes"),
        "gradient_predivide_factor": accept(NUMBERS, "any factor but 0"),
        "num_groups": accept("whole huge", "deprecated: any number of groups"),
        "groups": accept("none whole huge", "any number of groups"),
        "comm_hook": accept("none", "an allreduce"),
        "device_ids": accept("none", "tensors stay where they are"),
        "broadcast_buffers": accept("none true", "a flag"),
        "process_group": accept("none", "all ranks"),
        "bucket_cap_mb": accept("none whole huge fraction", "any size"),
        "delay_all_reduce_named_params": accept("none", "no such parameters"),
        "param_to_hook_all_reduce": accept("none", "no such parameter"),
        "mixed_precision": accept("none", "no casts"),
        "device_mesh": accept("none", "all ranks"),
        "device_mesh.shape": accept("none", "all ranks in one dimension"),
        "bucket_cap_mb_list": accept("none numbers tensor", "any sizes"),
        "forward_sync_buffers": accept("none true", "a flag"),
        "num_features": accept("whole", "a number of channels"),
        "eps": accept("whole huge fraction", "any number from 0"),
        "momentum": accept("none", "an average over all batches, as in torch"),
        "SyncBatchNorm.process_group": accept("none unregistered", "it may be registered later"),
        "SyncBatchNorm.convert_sync_batchnorm.process_group": accept("none unregistered", "it may be registered later"),
        "remove_process_set.process_set": accept("unregistered", "False"),
        "SyncBatchNorm.device": accept("none whole", "the default device, or a GPU by its number", called=False),
        "dtype": accept("", "a torch.dtype"),
        "SyncBatchNorm.dtype": accept("none", "the default dtype"),
        "file_path": accept("text", "a path", called=False),
        **{
            f"run.{name}": accept(names, reason, called=False)
            for name, names, reason in (
                ("func", "class", "what can be called and pickled"),
                ("kwargs", "none dictionary", "names and values"),
                ("num_proc", "whole", "a number of processes"),
                ("np", "none whole", "a number of processes"),
                ("hosts", "none text", "hosts"),
                ("start_timeout", "none whole huge fraction", "any number of seconds"),
                ("ssh_port", "none whole", "a port"),
                ("verbose", "none true whole huge", "a level"),
                ("network_interface", "none text", "names"),
                ("network_interfaces", "none list", "names"),
                ("use_gloo", "none true", "a flag"),
                ("use_mpi", "none", "unset"),
                ("disable_cache", "all", "without effect"),
                ("mpi_args", "all", "without effect"),
                *((name, "none text", "a path") for name in ("executable", "output_filename", "ssh_identity_file")),
                ("hostfile", "none", "no file"),
                *((name, "none", "an elastic job is refused") for name in ELASTIC),
            )
        },
        "fn": accept("class", "what can be called and pickled", called=False),
        "args": accept("list numbers tensor", "any arguments", called=False),
        "nprocs": accept("none whole", "a number of processes", called=False),
        "backend": accept("none", "the usual one", called=False),
        "transport": accept("none", "the usual one", called=False),
        "env": accept("none", "no variables", called=False),
        "timeout": accept("none whole huge fraction", "any number of seconds", called=False),
        "path": accept("text", "a path", called=False),
        "directory": accept("text", "a path", called=False),
        "checkpoint.save.state": accept("dictionary", "plain values"),
        "checkpoint.load.state": accept("none dictionary", "nothing is changed, or plain values"),
        "checkpoint.CheckpointManager.state": accept("dictionary", "plain values"),
        "step": accept("none whole huge", "any number of steps"),
        "metrics": accept("none dictionary", "no metrics, or numbers"),
        "metrics.compute.metrics": accept("", "metrics of this package"),
        "keep": accept("none whole huge", "all, or a number"),
        "keep_best": accept("", "the cases have no metric"),
        "every_steps": accept("none whole huge", "never, or a number of steps"),
        "every_seconds": accept("none whole huge fraction", "never, or a number of seconds"),
        "best": accept("none", "no metric"),
        "exit_code": accept("whole", "an exit code"),
        "agree_every": accept("whole huge", "a number of steps"),
        "checkpoint.export_weights.model": accept("", "a module"),
        "offset": accept("none whole huge", "the rank, or any number"),
        "lr": accept(NUMBERS, "any number"),
        "factor": accept("none whole huge fraction", "the size of the world, or how many times the batch is larger"),
        "rule": accept("", "one of two names"),
        "steps": accept("whole huge", "any number of steps"),
        "then": accept("none", "no other scheduler"),
        "shape": accept("", "extents"),
        "values": accept("true whole negative fraction nan infinite", "a number, also one that diverges"),
        "metrics.Sum.update.values": accept(
            "true whole negative fraction nan infinite numbers tensor", "numbers, also those that diverge"
        ),
        "count": accept("whole huge fraction", "a number of samples"),
        "num_classes": accept("whole", "a number of classes"),
        "ignore_index": accept("none whole negative huge", "any integer"),
        "group": accept("none", "all ranks"),
        "length": accept("none", "no check"),
        "outputs": accept("", "a tensor with one row"),
        "elastic.TorchState.model": accept("none", "no model"),
        "elastic.TorchState.optimizer": accept("none", "no optimizer"),
        "timestamp": accept("whole negative huge fraction", "any number of seconds"),
        "update_res": accept("", "1, 2 or 3"),
        "func": accept("class", "what can be called"),
        "reset": accept("class", "what can be called"),
        "bcast_object": accept("class", "what can be called"),
        "get_rank": accept("class", "what can be called"),
        "synchronize.handle": accept("whole negative huge", "None for an unknown handle, as in Horovod"),
    }
)


def accepted(function: str, parameter: str) -> Accepted:
    """Return what `parameter` of `function` accepts."""
    nothing = accept("", "")
    return ACCEPTED.get(f"{function}.{parameter}", ACCEPTED.get(parameter, nothing))


def odd_values(function: str, parameter: str) -> Mapping[str, Callable[[], Any]]:
    """Return the odd values for `parameter` of `function`, by name."""
    more = MORE.get(f"{function}.{parameter}", MORE.get(parameter, {}))
    return {**ODD, **more}
