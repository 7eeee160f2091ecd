"""Calls every public name of Horovod once, in two processes, and writes what each call returned or raised.

Knows nothing of dualdist: the same calls run on real Horovod and on dualdist.compat. See test_horovod_names.py.
"""

from __future__ import annotations

import copy
import json
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import horovod
import horovod.data
import horovod.runner
import horovod.torch as hvd
import torch
from horovod.common import basics, elastic, exceptions, process_sets, util
from horovod.torch import compression, mpi_ops, optimizer, sync_batch_norm
from horovod.torch.elastic import state as state_module

AVERAGE_OF_TWO = {"op": hvd.Average, "prescale_factor": 2.0}
waited = hvd.synchronize


def plain(value: Any) -> Any:
    """Return `value` as plain numbers, strings and lists."""
    if isinstance(value, torch.Tensor):
        return [str(value.dtype), value.detach().to_dense().tolist()]
    if isinstance(value, Mapping):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, tuple | list | set):
        return [plain(item) for item in value]
    if isinstance(value, type):
        return f"class {value.__name__}"
    return value if isinstance(value, bool | int | float | str | None) else f"a {type(value).__name__}"


def rows(count: int = 2) -> torch.Tensor:
    return torch.arange(2.0 * count).view(count, 2) + float(hvd.rank())


def in_place(function: Callable[..., Any], **options: Any) -> list[Any]:
    tensor = rows()
    result = function(tensor, **options)
    return [result is tensor, tensor]


def gradient(function: Callable[[torch.Tensor], Any]) -> list[Any]:
    tensor = rows().requires_grad_()
    result = function(tensor)
    first = result[0] if isinstance(result, tuple | list) else result
    first.backward(torch.ones_like(first))  # a contiguous gradient, which Horovod needs
    return [result, tensor.grad]


def small_model() -> torch.nn.Linear:
    model = torch.nn.Linear(2, 1, bias=False)
    torch.nn.init.constant_(model.weight, 1.0 + hvd.rank())
    return model


def train(**options: Any) -> list[Any]:
    model = small_model()
    hvd.broadcast_parameters(model.state_dict(), root_rank=1)
    inner = torch.optim.SGD(model.parameters(), lr=0.5)
    wrapped = hvd.DistributedOptimizer(inner, named_parameters=model.named_parameters(), **options)
    model(rows()).sum().backward()
    wrapped.step()
    return [model.weight, sorted(wrapped._parameter_names.values()), len(wrapped._handles), type(wrapped).__module__]


def stepped_twice() -> list[str]:
    model = small_model()
    wrapped = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5))
    model(rows()).sum().backward()
    wrapped.synchronize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        wrapped.step()
    return [str(warning.message) for warning in caught]


def private_attributes(passes: int) -> list[Any]:
    """Return what scripts read of an optimizer that combines every second pass, before and after `passes` passes."""
    model = small_model()
    wrapped = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5), backward_passes_per_step=2)
    found: list[Any] = [[list(wrapped._allreduce_delay.values()), len(wrapped._requires_update)]]
    for _ in range(passes):
        model(rows()).sum().backward()
        found.append([list(wrapped._allreduce_delay.values()), wrapped._should_synchronize])
    wrapped.synchronize()
    found.append([wrapped._synchronized, list(wrapped._allreduce_delay.values()), len(wrapped._handles)])
    with wrapped.skip_synchronize():
        wrapped.step()
    return [*found, wrapped._synchronized, wrapped.op, wrapped.backward_passes_per_step, len(wrapped._parameter_names)]


def averaged_by_name() -> list[Any]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        results = [
            hvd.allreduce(rows(), True),
            hvd.allreduce(rows(), False, "named"),
            hvd.allreduce(rows(), None, "third", hvd.Compression.fp16),
        ]
    return [*results, sorted({warning.category.__name__ for warning in caught})]


def state_of_model() -> list[Any]:
    model = small_model()
    state = hvd.elastic.TorchState(model=model, epoch=hvd.rank())
    state.sync()
    state.epoch = 7
    state.commit()
    state.epoch = 9
    state.restore()
    return [model.weight, state.epoch]


def handled(kind: Any, value: Any) -> list[Any]:
    handler = kind(value)
    handler.save()
    handler.restore()
    handler.sync()
    return [handler.value is value, value.state_dict()]


def trained_elastically() -> Any:
    state = elastic.ObjectState(hvd.broadcast_object, hvd.rank, epoch=hvd.rank() + 3)

    @hvd.elastic.run  # type: ignore[untyped-decorator]
    def work(state: Any, factor: int) -> int:
        state.commit()
        return int(state.epoch * factor)

    return work(state, 2)


def sampled() -> list[Any]:
    sampler = hvd.elastic.ElasticSampler(list(range(8)), shuffle=False)
    sampler.record_batch(0, 2)
    before = list(sampler)
    sampler.reset()
    return [before, list(sampler), len(sampler), sampler.state_dict()["processed_indices"] != []]


def processed_in_a_set() -> list[Any]:
    added = hvd.add_process_set([1])
    found = [added.ranks, added.size(), added.included(), str(added).startswith("ProcessSet(")]
    return [*found, hvd.remove_process_set(added), hvd.remove_process_set(added)]


def timeline() -> list[Any]:
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "timeline.json")
        hvd.start_timeline(path, mark_cycles=True)
        hvd.allreduce(rows(), name="shown")
        hvd.stop_timeline()
        return [os.path.exists(path) or hvd.rank() != 0]


def notified() -> list[Any]:
    class Listener:
        def on_hosts_updated(self, timestamp: float, update_res: int) -> None:
            seen.append([timestamp, int(update_res)])

    seen: list[Any] = []
    listener = Listener()
    manager = elastic.WorkerNotificationManager()
    for one in (manager, elastic.notification_manager):
        one.register_listener(listener)
        one.handle_hosts_updated(1.0, elastic.HostUpdateResult.added)
        one.remove_listener(listener)
    return seen


class Loader(horovod.data.BaseDataLoader):  # type: ignore[misc]
    def __len__(self) -> int:
        return 3

    def _iterate(self) -> Any:
        yield from range(3)

    def _process_batch(self, batch: Any) -> Any:
        return batch * 10


class AsyncLoader(horovod.data.AsyncDataLoaderMixin, Loader):  # type: ignore[misc]
    pass


def loaded() -> list[Any]:
    loader = AsyncLoader()
    return [list(loader), list(loader), len(loader), list(AsyncLoader(0))]


def with_environment() -> list[Any]:
    with util.env(CALLS_A="1", CALLS_B=None):
        inside = [os.environ.get("CALLS_A"), os.environ.get("CALLS_B")]
    return [*inside, os.environ.get("CALLS_A")]


def normalized() -> Any:
    layer = hvd.SyncBatchNorm(2)
    return [layer.eps, layer.momentum, sorted(layer.state_dict()), layer(rows(4))]


def registered() -> list[Any]:
    registry = list(state_module.get_handler_registry())
    state_module.set_handler_registry(registry)
    handlers, values = state_module._get_handlers({"model": small_model(), "epoch": 3})
    return [sorted(handlers), values, [kind.__name__ for kind, _ in registry[:3]]]


def joined() -> Any:
    if hvd.rank() == 0:
        hvd.allreduce(rows(), op=hvd.Sum, name="alone")
    return hvd.join()


def sparse() -> Any:
    tensor = torch.sparse_coo_tensor(torch.tensor([[hvd.rank()]]), torch.tensor([2.0]), (3,), check_invariants=True)
    return hvd.sparse_allreduce_async(tensor, name="sparse", op=hvd.Average)()


def on_both(function: Callable[[], Any]) -> Any:
    """Return the result of a query whose answer depends on how the processes were started: only its type."""
    return type(function()).__name__


def built(name: str) -> list[Any]:
    return [on_both(getattr(hvd, name)), on_both(getattr(util, name))]


TENSOR, SECOND, EVERY = "the tensor", torch.ones(2, 2), hvd.global_process_set
APPLIED: dict[str, tuple[Any, ...]] = {
    "HorovodAllreduce": (TENSOR, None, "a", hvd.Sum, 1.0, 1.0, EVERY),
    "HorovodGroupedAllreduce": (None, "b", hvd.Sum, 1.0, 1.0, EVERY, TENSOR, SECOND),
    "HorovodAllgather": (TENSOR, "c", EVERY),
    "HorovodGroupedAllgather": ("d", EVERY, TENSOR, SECOND),
    "HorovodBroadcast": (TENSOR, 0, "e", EVERY),
    "HorovodAlltoall": (TENSOR, None, "f", EVERY),
    "HorovodReducescatter": (TENSOR, "g", hvd.Sum, EVERY, 1.0, 1.0),
    "HorovodGroupedReducescatter": ("h", hvd.Sum, EVERY, 1.0, 1.0, TENSOR, SECOND),
}
"""Functions of autograd, and their arguments."""


def applied(name: str, *arguments: Any) -> list[Any]:
    def apply(tensor: torch.Tensor) -> Any:
        return getattr(mpi_ops, name).apply(*(tensor if one is TENSOR else one for one in arguments))

    return gradient(apply)


CALLS: dict[str, Callable[[], Any]] = {
    "is_initialized": lambda: [hvd.is_initialized(), hvd.init(), hvd.is_initialized()],
    "init": lambda: hvd.init(),
    **{name: getattr(hvd, name) for name in ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size")},
    "is_homogeneous": lambda: bool(hvd.mpi_ops.is_homogeneous()),
    "mpi_threads_supported": lambda: hvd.mpi_threads_supported(),
    **{name: getattr(hvd, name) for name in ("mpi_enabled", "gloo_enabled")},
    **{name: partial(built, name) for name in ("mpi_built", "gloo_built", "nccl_built", "ddl_built", "ccl_built")},
    **{name: partial(on_both, getattr(hvd, name)) for name in ("cuda_built", "rocm_built")},
    "__version__": lambda: horovod.__version__,
    "run": lambda: [callable(horovod.run), horovod.run is horovod.runner.run],
    **{name: partial(getattr, hvd, name) for name in ("Average", "Sum", "Adasum", "Min", "Max", "Product")},
    "allreduce": lambda: [hvd.allreduce(rows()), averaged_by_name(), gradient(hvd.allreduce)],
    "allreduce_": lambda: in_place(hvd.allreduce_, op=hvd.Sum),
    "allreduce_async": lambda: waited(hvd.allreduce_async(rows(), **AVERAGE_OF_TWO)),
    "allreduce_async_": lambda: waited(hvd.allreduce_async_(rows(), name="x", op=hvd.Max)),
    "grouped_allreduce": lambda: hvd.grouped_allreduce([rows(), rows(1)], op=hvd.Sum),
    "grouped_allreduce_": lambda: hvd.grouped_allreduce_([rows(), rows(1)], op=hvd.Min),
    "grouped_allreduce_async": lambda: waited(hvd.grouped_allreduce_async([rows(), rows(1)])),
    "grouped_allreduce_async_": lambda: waited(hvd.grouped_allreduce_async_([rows(), rows(1)], op=hvd.Product)),
    "sparse_allreduce_async": sparse,
    "allgather": lambda: [hvd.allgather(rows(1 + hvd.rank())), gradient(hvd.allgather)],
    "allgather_async": lambda: waited(hvd.allgather_async(rows(), "gathered")),
    "grouped_allgather": lambda: hvd.grouped_allgather([rows(), rows(1)]),
    "grouped_allgather_async": lambda: waited(hvd.grouped_allgather_async([rows(), rows(1)])),
    "broadcast": lambda: [hvd.broadcast(rows(), 1), gradient(lambda tensor: hvd.broadcast(tensor, 1))],
    "broadcast_": lambda: in_place(hvd.broadcast_, root_rank=1),
    "broadcast_async": lambda: waited(hvd.broadcast_async(rows(), 0, "sent")),
    "broadcast_async_": lambda: waited(hvd.broadcast_async_(rows(), 1)),
    "alltoall": lambda: [hvd.alltoall(rows()), hvd.alltoall(rows(3), torch.tensor([1, 2])), gradient(hvd.alltoall)],
    "alltoall_async": lambda: waited(hvd.alltoall_async(rows(), torch.tensor([1, 1], dtype=torch.int32))),
    "reducescatter": lambda: [hvd.reducescatter(rows(3), op=hvd.Sum), gradient(hvd.reducescatter)],
    "reducescatter_async": lambda: waited(hvd.reducescatter_async(rows(), op=hvd.Average)),
    "grouped_reducescatter": lambda: hvd.grouped_reducescatter([rows(), rows(4)], op=hvd.Sum),
    "grouped_reducescatter_async": lambda: waited(hvd.grouped_reducescatter_async([rows(), rows(4)])),
    "barrier": lambda: hvd.barrier(),
    "poll": lambda: [type(hvd.poll(handle := hvd.allreduce_async(rows()))).__name__, waited(handle)],
    "synchronize": lambda: waited(hvd.allreduce_async(rows())),
    "broadcast_object": lambda: hvd.broadcast_object({"rank": hvd.rank()}, root_rank=1),
    "allgather_object": lambda: hvd.allgather_object([hvd.rank()] * (hvd.rank() + 1)),
    "broadcast_parameters": lambda: train(),
    "broadcast_optimizer_state": lambda: hvd.broadcast_optimizer_state(
        torch.optim.SGD(small_model().parameters(), lr=0.1), root_rank=0
    ),
    "DistributedOptimizer": lambda: [train(), train(op=hvd.Sum), train(backward_passes_per_step=1), stepped_twice()],
    "Compression": lambda: [
        hvd.Compression.none is compression.NoneCompressor,
        hvd.Compression.fp16.compress(torch.ones(2)),
    ],
    "Compressor": lambda: compression.Compressor,
    "NoneCompressor": lambda: compression.NoneCompressor.compress(torch.ones(2)),
    "FP16Compressor": lambda: compression.FP16Compressor.decompress(torch.ones(2).half(), torch.float32),
    "SyncBatchNorm": normalized,
    "ProcessSet": lambda: [
        hvd.ProcessSet([1, 0]).ranks,
        hvd.ProcessSet([0]).process_set_id,
        hvd.ProcessSet([0]).size(),
    ],
    "global_process_set": lambda: [
        hvd.global_process_set.ranks,
        hvd.global_process_set.process_set_id,
        process_sets.global_process_set is hvd.global_process_set,
    ],
    "add_process_set": processed_in_a_set,
    "remove_process_set": lambda: hvd.remove_process_set(hvd.global_process_set),
    "start_timeline": timeline,
    "stop_timeline": timeline,
    "HorovodInternalError": lambda: [hvd.HorovodInternalError is exceptions.HorovodInternalError, "x"],
    "HostsUpdatedInterrupt": lambda: [exceptions.HostsUpdatedInterrupt(True).skip_sync],
    "HorovodVersionMismatchError": lambda: vars(exceptions.HorovodVersionMismatchError("torch", "2", "1"))["version"],
    "get_version_mismatch_message": lambda: exceptions.get_version_mismatch_message("torch", "2", "1")[:60],
    "HorovodBasics": lambda: [
        basics.HorovodBasics.__name__,
        mpi_ops._basics.rank(),
        mpi_ops._basics.Sum,
        mpi_ops._basics._get_process_set_ids_and_ranks(),
    ],
    "handle_average_backwards_compatibility": lambda: [
        mpi_ops.handle_average_backwards_compatibility(None, None),
        mpi_ops.handle_average_backwards_compatibility(hvd.Sum, None),
        mpi_ops.handle_average_backwards_compatibility(None, False),
    ],
    "get_average_backwards_compatibility_fun": lambda: util.get_average_backwards_compatibility_fun(hvd)(2, True),
    **{name: partial(applied, name, *arguments) for name, arguments in APPLIED.items()},
    "EXTENSIONS": lambda: util.EXTENSIONS,
    "check_extension": lambda: util.check_extension("horovod.torch", "X", hvd.__file__, "mpi_lib_v2"),
    "check_installed_version": lambda: util.check_installed_version("pytorch", torch.__version__),
    "env": with_environment,
    "extension_available": lambda: [util.extension_available("torch"), util.extension_available("mxnet")],
    "get_ext_suffix": lambda: util.get_ext_suffix(),
    "get_extension_full_path": lambda: util.get_extension_full_path("/a/b.py", "c", "d"),
    "gpu_available": lambda: bool(mpi_ops.gpu_available("torch")) == torch.cuda.is_available(),
    "is_iterable": lambda: [util.is_iterable([]), util.is_iterable(1)],
    "is_version_greater_equal_than": lambda: [
        util.is_version_greater_equal_than(ver, target)
        for ver, target in (("1.10.0", "1.9.0"), ("2.0.0rc1", "2.0.0"), ("2.15.0+cu132", "2.15.0"))
    ],
    "num_rank_is_power_2": lambda: [mpi_ops.num_rank_is_power_2(4), mpi_ops.num_rank_is_power_2(6)],
    "split_list": lambda: util.split_list([1, 2, 3, 4, 5], 2),
    "BaseDataLoader": lambda: [list(Loader()), len(Loader())],
    "AsyncDataLoaderMixin": loaded,
    "HostUpdateResult": lambda: [int(elastic.HostUpdateResult.mixed), elastic.HostUpdateResult.removed.name],
    "WorkerNotificationManager": notified,
    "notification_manager": lambda: elastic.notification_manager.init(),
    "State": lambda: elastic.State(hvd.broadcast_object, hvd.rank).check_host_updates(),
    "ObjectState": trained_elastically,
    "run_fn": lambda: elastic.run_fn(lambda state: state.epoch, lambda: None)(
        elastic.ObjectState(hvd.broadcast_object, hvd.rank, epoch=4)
    ),
    "TorchState": state_of_model,
    "ElasticSampler": sampled,
    "StateHandler": lambda: state_module.StateHandler(3).value,
    "ModelStateHandler": lambda: handled(state_module.ModelStateHandler, small_model()),
    "OptimizerStateHandler": lambda: handled(
        state_module.OptimizerStateHandler, torch.optim.SGD(small_model().parameters(), lr=0.1)
    )[:1],
    "SamplerStateHandler": lambda: handled(
        state_module.SamplerStateHandler, hvd.elastic.ElasticSampler(list(range(4)), shuffle=False)
    )[:1],
    "get_handler_registry": registered,
    "set_handler_registry": registered,
    "_DistributedOptimizer": lambda: [
        optimizer._DistributedOptimizer,
        sync_batch_norm._SyncBatchNorm,
        private_attributes(1),
    ],
    "_allreduce_delay": lambda: private_attributes(2),
    # Last, because the names of later unnamed calls would differ between the ranks of Horovod.
    "join": joined,
    "shutdown": lambda: [hvd.shutdown(), hvd.is_initialized(), hvd.rank()],
}
"""Public name -> a call. They run in this order, on both ranks."""


def main(folder: str) -> None:
    found: dict[str, Any] = {}
    rank = os.environ["HOROVOD_RANK"]
    for name, call in CALLS.items():
        if "-v" in sys.argv:
            print(name, file=sys.stderr, flush=True)
        try:
            found[name] = plain(copy.deepcopy(plain(call())))
        except Exception as error:
            kinds = [kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "builtins"]
            found[name] = {"raised": kinds, "text": str(error) if "initialized" in str(error) else ""}
    Path(folder, f"{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
