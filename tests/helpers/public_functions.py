"""How to call every public function: with valid arguments, and with one of them replaced."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import dualdist as hvd
from dualdist import checkpoint, elastic, lr, metrics, samplers, seeding

__all__ = ("CASES", "COLLECTIVES", "Case")

Make = Callable[[], Mapping[str, Any]]


@dataclass(frozen=True)
class Case:
    """A public function."""

    function: Callable[..., Any]
    """For its parameters."""
    valid: Make = dict
    """Makes valid arguments: all that are required."""
    call: Callable[..., Any] | None = None
    """What to call, if not the function itself: it waits for asynchronous calls, or makes the object of a method."""

    def run(self, **others: Any) -> Any:
        """Call it with valid arguments, except those in `others`."""
        return (self.call or self.function)(**{**self.valid(), **others})


def finished(function: Callable[..., int]) -> Callable[..., Any]:
    """Return `function` and waiting for its handle."""
    return lambda **arguments: hvd.synchronize(function(**arguments))


def rows() -> torch.Tensor:
    return torch.ones(6)


def one() -> dict[str, Any]:
    return {"tensor": rows()}


def two() -> dict[str, Any]:
    return {"tensors": [rows(), rows()]}


def rooted() -> dict[str, Any]:
    return {"tensor": rows(), "root_rank": 0}


def sparse() -> dict[str, Any]:
    return {"tensor": rows().to_sparse(), "name": None, "op": hvd.Sum}


COLLECTIVES: dict[str, Case] = {
    **{
        name: Case(getattr(hvd, name), one)
        for name in ("allreduce", "allreduce_", "allgather", "alltoall", "reducescatter")
    },
    **{
        name: Case(getattr(hvd, name), one, finished(getattr(hvd, name)))
        for name in (
            "allreduce_async",
            "allreduce_async_",
            "allgather_async",
            "alltoall_async",
            "reducescatter_async",
        )
    },
    **{
        name: Case(getattr(hvd, name), two)
        for name in ("grouped_allreduce", "grouped_allreduce_", "grouped_allgather", "grouped_reducescatter")
    },
    **{
        name: Case(getattr(hvd, name), two, finished(getattr(hvd, name)))
        for name in (
            "grouped_allreduce_async",
            "grouped_allreduce_async_",
            "grouped_allgather_async",
            "grouped_reducescatter_async",
        )
    },
    **{
        name: Case(getattr(hvd, name), rooted)
        for name in ("broadcast", "broadcast_", "reduce", "gather", "scatter")
    },
    **{
        name: Case(getattr(hvd, name), rooted, finished(getattr(hvd, name)))
        for name in ("broadcast_async", "broadcast_async_")
    },
    "sparse_allreduce_async": Case(
        hvd.sparse_allreduce_async, sparse, lambda **arguments: hvd.sparse_allreduce_async(**arguments)()
    ),
    **{
        name: Case(getattr(hvd, name), lambda: {"obj": 1})
        for name in ("broadcast_object", "allgather_object", "gather_object")
    },
    "scatter_object": Case(hvd.scatter_object, lambda: {"objs": [1] * hvd.size()}),
    "barrier": Case(hvd.barrier),
}


def sampler() -> hvd.DistributedSampler:
    """Return a sampler that has drawn all its samples."""
    made = hvd.DistributedSampler(range(6))
    list(made)
    return made


def classes() -> dict[str, Any]:
    return {"predicted": torch.zeros(6, dtype=torch.int64), "targets": torch.zeros(6, dtype=torch.int64)}


def sgd() -> torch.optim.SGD:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(3))], lr=1.0)


def of_dataset() -> dict[str, Any]:
    return {"dataset": range(12)}


DATA: dict[str, Case] = {
    "DistributedSampler": Case(hvd.DistributedSampler, of_dataset),
    "DistributedSampler.set_epoch": Case(
        hvd.DistributedSampler.set_epoch, call=lambda **arguments: sampler().set_epoch(**arguments)
    ),
    "DistributedSampler.advance": Case(
        hvd.DistributedSampler.advance, call=lambda **arguments: sampler().advance(**arguments)
    ),
    "DistributedSampler.load_state_dict": Case(
        hvd.DistributedSampler.load_state_dict,
        call=lambda **arguments: sampler().load_state_dict(**arguments),
    ),
    "samplers.DistributedSamplerWrapper": Case(
        samplers.DistributedSamplerWrapper, lambda: {"sampler": range(12)}
    ),
    "samplers.DealingSampler.load_state_dict": Case(
        samplers.DealingSampler.load_state_dict,
        call=lambda **arguments: samplers.DistributedSamplerWrapper(range(12)).load_state_dict(**arguments),
    ),
    "split_by_rank": Case(hvd.split_by_rank, lambda: {"iterable": range(12)}),
    "elastic.ElasticSampler": Case(elastic.ElasticSampler, of_dataset),
    "elastic.ElasticSampler.set_epoch": Case(
        elastic.ElasticSampler.set_epoch,
        call=lambda **arguments: elastic.ElasticSampler(range(12)).set_epoch(**arguments),
    ),
    "elastic.ElasticSampler.record_batch": Case(
        elastic.ElasticSampler.record_batch,
        lambda: {"batch_idx": 0, "batch_size": 1},
        lambda **arguments: elastic.ElasticSampler(range(12)).record_batch(**arguments),
    ),
    "elastic.ElasticSampler.load_state_dict": Case(
        elastic.ElasticSampler.load_state_dict,
        call=lambda **arguments: elastic.ElasticSampler(range(12)).load_state_dict(**arguments),
    ),
    "seed_everything": Case(hvd.seed_everything, lambda: {"seed": 1}),
    "seeding.worker_init_fn": Case(seeding.worker_init_fn),
    "lr.scaled": Case(lr.scaled, lambda: {"lr": 0.1}),
    "lr.warmup": Case(lr.warmup, lambda: {"optimizer": sgd(), "steps": 3}),
}

METRICS: dict[str, Case] = {
    "metrics.Mean": Case(metrics.Mean),
    "metrics.Mean.update": Case(
        metrics.Mean.update,
        lambda: {"values": 1.0, "count": 2},
        lambda **arguments: metrics.Mean().update(**arguments),
    ),
    "metrics.Sum": Case(metrics.Sum),
    "metrics.Sum.update": Case(
        metrics.Sum.update, call=lambda **arguments: metrics.Sum().update(**arguments)
    ),
    "metrics.ConfusionMatrix": Case(metrics.ConfusionMatrix, lambda: {"num_classes": 3}),
    "metrics.ConfusionMatrix.update": Case(
        metrics.ConfusionMatrix.update,
        classes,
        lambda **arguments: metrics.ConfusionMatrix(3).update(**arguments),
    ),
    "metrics.ConfusionMatrix.load_state_dict": Case(
        metrics.ConfusionMatrix.load_state_dict,
        call=lambda **arguments: metrics.ConfusionMatrix(3).load_state_dict(**arguments),
    ),
    "metrics.compute": Case(metrics.compute),
    "metrics.gather_all_tensors": Case(metrics.gather_all_tensors, one),
    "metrics.gather_in_order": Case(
        metrics.gather_in_order,
        lambda: {"outputs": rows()[:1], "indices": [hvd.rank()]},
    ),
}


def linear() -> torch.nn.Linear:
    return torch.nn.Linear(2, 2)


def distributed() -> hvd.SynchronizedOptimizer:
    return hvd.DistributedOptimizer(sgd())


def timeline(**arguments: Any) -> None:
    """Start and stop a timeline."""
    with tempfile.TemporaryDirectory() as folder:
        hvd.start_timeline(**{"file_path": f"{folder}/timeline", **arguments})
        hvd.stop_timeline()


def entered(context: Any) -> None:
    with context:
        pass


TRAINING: dict[str, Case] = {
    "broadcast_parameters": Case(
        hvd.broadcast_parameters, lambda: {"params": linear().state_dict(), "root_rank": 0}
    ),
    "broadcast_optimizer_state": Case(
        hvd.broadcast_optimizer_state, lambda: {"optimizer": sgd(), "root_rank": 0}
    ),
    "DistributedOptimizer": Case(hvd.DistributedOptimizer, lambda: {"optimizer": sgd()}),
    "SynchronizedOptimizer.add_param_group": Case(
        hvd.SynchronizedOptimizer.add_param_group,
        call=lambda **arguments: distributed().add_param_group(**arguments),
    ),
    "SynchronizedOptimizer.set_backward_passes_per_step": Case(
        hvd.SynchronizedOptimizer.set_backward_passes_per_step,
        call=lambda **arguments: distributed().set_backward_passes_per_step(**arguments),
    ),
    "DistributedDataParallel": Case(hvd.DistributedDataParallel, lambda: {"module": linear()}),
    "DistributedDataParallel.join": Case(
        hvd.DistributedDataParallel.join,
        call=lambda **arguments: entered(hvd.DistributedDataParallel(linear()).join(**arguments)),
    ),
    "SyncBatchNorm": Case(hvd.SyncBatchNorm, lambda: {"num_features": 3}),
    "SyncBatchNorm.forward": Case(
        hvd.SyncBatchNorm.forward, call=lambda **arguments: hvd.SyncBatchNorm(3).forward(**arguments)
    ),
    "SyncBatchNorm.convert_sync_batchnorm": Case(
        hvd.SyncBatchNorm.convert_sync_batchnorm, lambda: {"module": linear()}
    ),
    "SyncBatchNorm.revert_sync_batchnorm": Case(hvd.SyncBatchNorm.revert_sync_batchnorm),
}


def shared_folder() -> contextlib.AbstractContextManager[str]:
    """Make a temporary folder of this rank; only rank 0 of a world writes into its own."""
    return tempfile.TemporaryDirectory()


def saved(**arguments: Any) -> None:
    with shared_folder() as folder:
        checkpoint.save(**{"path": f"{folder}/a.pt", "state": {"x": 1}, **arguments})


def loaded(**arguments: Any) -> Any:
    with shared_folder() as folder:
        checkpoint.save(f"{folder}/a.pt", {"x": 1})
        return checkpoint.load(**{"path": f"{folder}/a.pt", **arguments})


def exported(**arguments: Any) -> None:
    with shared_folder() as folder:
        checkpoint.export_weights(**{"path": f"{folder}/a.pt", "model": linear(), **arguments})


def managed(act: Callable[[Any, Any], Any] = lambda manager, folder: None, **options: Any) -> None:
    """Make a manager, save once, and do `act` with it and its folder."""
    with shared_folder() as folder:
        given = {"directory": folder, "state": {"x": 1}, "every_steps": 1, **options}
        manager = checkpoint.CheckpointManager(**given)
        try:
            act(manager, folder)
        finally:
            manager.close()


def on_manager(method: str, **valid: Any) -> Callable[..., None]:
    """Return a function that calls a method of a manager that has saved once."""

    def call(**arguments: Any) -> None:
        def act(manager: Any, folder: str) -> None:
            manager.save({"x": 1.0})
            path = {"path": next(Path(folder).glob("step*"), folder)} if method == "restore" else {}
            getattr(manager, method)(**{**path, **valid, **arguments})

        managed(act)

    return call


CHECKPOINTS: dict[str, Case] = {
    "checkpoint.save": Case(checkpoint.save, call=saved),
    "checkpoint.load": Case(checkpoint.load, call=loaded),
    "checkpoint.export_weights": Case(checkpoint.export_weights, call=exported),
    "checkpoint.read_manifest": Case(checkpoint.read_manifest),
    "checkpoint.CheckpointManager": Case(
        checkpoint.CheckpointManager, call=lambda **options: managed(**options)
    ),
    **{
        f"checkpoint.CheckpointManager.{method}": Case(
            getattr(checkpoint.CheckpointManager, method), call=on_manager(method)
        )
        for method in ("step", "save", "restore", "restore_latest", "restore_best")
    },
    "checkpoint.RandomState.load_state_dict": Case(
        checkpoint.RandomState.load_state_dict,
        call=lambda **arguments: checkpoint.RandomState().load_state_dict(**arguments),
    ),
}


def elastic_state() -> elastic.ObjectState:
    return elastic.ObjectState(hvd.broadcast_object, hvd.rank, epoch=0)


def registered(**arguments: Any) -> None:
    """Set the registry, and then the former one."""
    former = elastic.get_handler_registry()
    try:
        elastic.set_handler_registry(**{"registry": former, **arguments})
    finally:
        elastic.set_handler_registry(former)


def functions() -> dict[str, Any]:
    return {"bcast_object": hvd.broadcast_object, "get_rank": hvd.rank}


ELASTIC: dict[str, Case] = {
    "elastic.State": Case(elastic.State, functions),
    "elastic.ObjectState": Case(elastic.ObjectState, functions),
    "elastic.TorchState": Case(elastic.TorchState),
    **{
        f"elastic.State.{method}": Case(
            getattr(elastic.State, method),
            valid,
            lambda method=method, **arguments: getattr(elastic_state(), method)(**arguments),
        )
        for method, valid in (
            ("register_reset_callbacks", dict),
            ("on_hosts_updated", lambda: {"timestamp": 1.0, "update_res": 1}),
        )
    },
    "elastic.run": Case(elastic.run),
    "elastic.run_fn": Case(elastic.run_fn, lambda: {"func": print, "reset": print}),
    "elastic.ModelStateHandler": Case(elastic.ModelStateHandler),
    "elastic.OptimizerStateHandler": Case(elastic.OptimizerStateHandler),
    "elastic.SamplerStateHandler": Case(elastic.SamplerStateHandler),
    "elastic.ModelStateHandler.set_value": Case(
        elastic.ModelStateHandler.set_value,
        call=lambda **arguments: elastic.ModelStateHandler(linear()).set_value(**arguments),
    ),
    "elastic.set_handler_registry": Case(elastic.set_handler_registry, call=registered),
}

WORLD: dict[str, Case] = {
    "ProcessSet": Case(hvd.ProcessSet),
    "add_process_set": Case(hvd.add_process_set),
    "device_mesh": Case(hvd.device_mesh),
    "remove_process_set": Case(hvd.remove_process_set),
    "run": Case(hvd.run, lambda: {"func": print}),
    "spawn": Case(hvd.spawn, lambda: {"fn": print, "nprocs": 1}),
    "start_timeline": Case(hvd.start_timeline, call=timeline),
}

CASES: dict[str, Case] = {
    **CHECKPOINTS,
    **ELASTIC,
    **TRAINING,
    **WORLD,
    **DATA,
    **METRICS,
    **COLLECTIVES,
    "join": Case(hvd.join),
    "poll": Case(hvd.poll),
    "synchronize": Case(hvd.synchronize),
}
