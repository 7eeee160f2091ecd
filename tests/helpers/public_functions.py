"""How to call every public function: with valid arguments, and with one of them replaced."""

from __future__ import annotations

import contextlib
import operator
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import dualdist as hvd
from dualdist import checkpoint, elastic, metrics, samplers

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


def cases(names: str, valid: Make = dict, of: Callable[[], Any] | None = None) -> dict[str, Case]:
    """Return the cases of functions with the same valid arguments, by name. of: makes the object of methods."""
    return {name: _case(name, valid, of) for name in names.split()}


def _case(name: str, valid: Make, of: Callable[[], Any] | None) -> Case:
    function = operator.attrgetter(name)(hvd)
    if of is not None:
        method = name.rpartition(".")[2]
        return Case(function, valid, lambda **arguments: getattr(of(), method)(**arguments))
    if "_async" in name:
        return Case(function, valid, lambda **arguments: hvd.synchronize(function(**arguments)))
    return Case(function, valid)


def rows() -> torch.Tensor:
    return torch.ones(6)


def one() -> dict[str, Any]:
    return {"tensor": rows()}


def rooted() -> dict[str, Any]:
    return {"tensor": rows(), "root_rank": 0}


def sparse() -> dict[str, Any]:
    return {"tensor": rows().to_sparse(), "name": None, "op": hvd.Sum}


COLLECTIVES: dict[str, Case] = {
    **cases("allreduce allreduce_ allgather alltoall reducescatter", one),
    **cases("allreduce_async allreduce_async_ allgather_async alltoall_async reducescatter_async", one),
    **{
        name: case
        for kind in ("allreduce", "allgather", "reducescatter")
        for form in (("", "_", "_async", "_async_") if kind == "allreduce" else ("", "_async"))
        for name, case in cases(f"grouped_{kind}{form}", lambda: {"tensors": [rows(), rows()]}).items()
    },
    **cases("broadcast broadcast_ reduce gather scatter broadcast_async broadcast_async_", rooted),
    "sparse_allreduce_async": Case(
        hvd.sparse_allreduce_async, sparse, lambda **arguments: hvd.sparse_allreduce_async(**arguments)()
    ),
    **cases("broadcast_object allgather_object gather_object", lambda: {"obj": 1}),
    **cases("scatter_object", lambda: {"objs": [1] * hvd.size()}),
    **cases("barrier"),
}


def sampler() -> hvd.DistributedSampler:
    """Return a sampler that has drawn all its samples."""
    made = hvd.DistributedSampler(range(6))
    list(made)
    return made


def elastic_sampler() -> Any:
    return elastic.ElasticSampler(range(12))


def classes() -> dict[str, Any]:
    return {"predicted": torch.zeros(6, dtype=torch.int64), "targets": torch.zeros(6, dtype=torch.int64)}


def sgd() -> torch.optim.SGD:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(3))], lr=1.0)


DATA: dict[str, Case] = {
    **cases("DistributedSampler elastic.ElasticSampler", lambda: {"dataset": range(12)}),
    **cases("DistributedSampler.set_epoch DistributedSampler.advance DistributedSampler.load_state_dict", of=sampler),
    **cases("samplers.DistributedSamplerWrapper", lambda: {"sampler": range(12)}),
    **cases("samplers.DealingSampler.load_state_dict", of=lambda: samplers.DistributedSamplerWrapper(range(12))),
    **cases("split_by_rank", lambda: {"iterable": range(12)}),
    **cases("elastic.ElasticSampler.set_epoch elastic.ElasticSampler.load_state_dict", of=elastic_sampler),
    **cases("elastic.ElasticSampler.record_batch", lambda: {"batch_idx": 0, "batch_size": 1}, elastic_sampler),
    **cases("seed_everything", lambda: {"seed": 1}),
    **cases("seeding.worker_init_fn"),
    **cases("lr.scaled", lambda: {"lr": 0.1}),
    **cases("lr.warmup", lambda: {"optimizer": sgd(), "steps": 3}),
}

METRICS: dict[str, Case] = {
    **cases("metrics.Mean metrics.Sum metrics.compute"),
    **cases("metrics.Mean.update", lambda: {"values": 1.0, "count": 2}, metrics.Mean),
    **cases("metrics.Sum.update", of=metrics.Sum),
    **cases("metrics.ConfusionMatrix", lambda: {"num_classes": 3}),
    **cases("metrics.ConfusionMatrix.update", classes, lambda: metrics.ConfusionMatrix(3)),
    **cases("metrics.ConfusionMatrix.load_state_dict", of=lambda: metrics.ConfusionMatrix(3)),
    **cases("metrics.gather_all_tensors", one),
    **cases("metrics.gather_in_order", lambda: {"outputs": rows()[:1], "indices": [hvd.rank()]}),
}


def linear() -> torch.nn.Linear:
    return torch.nn.Linear(2, 2)


def timeline(**arguments: Any) -> None:
    """Start and stop a timeline."""
    with tempfile.TemporaryDirectory() as folder:
        hvd.start_timeline(**{"file_path": f"{folder}/timeline", **arguments})
        hvd.stop_timeline()


def entered(context: Any) -> None:
    with context:
        pass


TRAINING: dict[str, Case] = {
    **cases("broadcast_parameters", lambda: {"params": linear().state_dict(), "root_rank": 0}),
    **cases("broadcast_optimizer_state", lambda: {"optimizer": sgd(), "root_rank": 0}),
    **cases("DistributedOptimizer", lambda: {"optimizer": sgd()}),
    **cases(
        "SynchronizedOptimizer.add_param_group SynchronizedOptimizer.set_backward_passes_per_step",
        of=lambda: hvd.DistributedOptimizer(sgd()),
    ),
    **cases("DistributedDataParallel SyncBatchNorm.convert_sync_batchnorm", lambda: {"module": linear()}),
    "DistributedDataParallel.join": Case(
        hvd.DistributedDataParallel.join,
        call=lambda **arguments: entered(hvd.DistributedDataParallel(linear()).join(**arguments)),
    ),
    **cases("SyncBatchNorm", lambda: {"num_features": 3}),
    **cases("SyncBatchNorm.forward", of=lambda: hvd.SyncBatchNorm(3)),
    **cases("SyncBatchNorm.revert_sync_batchnorm"),
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
    **cases("checkpoint.read_manifest"),
    "checkpoint.CheckpointManager": Case(checkpoint.CheckpointManager, call=lambda **options: managed(**options)),
    **{
        f"checkpoint.CheckpointManager.{method}": Case(
            getattr(checkpoint.CheckpointManager, method), call=on_manager(method)
        )
        for method in ("step", "save", "restore", "restore_latest", "restore_best")
    },
    **cases("checkpoint.RandomState.load_state_dict", of=checkpoint.RandomState),
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
    **cases("elastic.State elastic.ObjectState", functions),
    **cases("elastic.TorchState elastic.run elastic.ModelStateHandler elastic.OptimizerStateHandler"),
    **cases("elastic.SamplerStateHandler"),
    **cases("elastic.State.register_reset_callbacks", of=elastic_state),
    **cases("elastic.State.on_hosts_updated", lambda: {"timestamp": 1.0, "update_res": 1}, elastic_state),
    **cases("elastic.run_fn", lambda: {"func": print, "reset": print}),
    **cases("elastic.ModelStateHandler.set_value", of=lambda: elastic.ModelStateHandler(linear())),
    "elastic.set_handler_registry": Case(elastic.set_handler_registry, call=registered),
}

WORLD: dict[str, Case] = {
    **cases("ProcessSet add_process_set device_mesh remove_process_set join poll synchronize"),
    **cases("run", lambda: {"func": print}),
    **cases("spawn", lambda: {"fn": print, "nprocs": 1}),
    "start_timeline": Case(hvd.start_timeline, call=timeline),
}

CASES: dict[str, Case] = {**CHECKPOINTS, **ELASTIC, **TRAINING, **WORLD, **DATA, **METRICS, **COLLECTIVES}
