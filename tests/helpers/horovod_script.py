"""A training script as it is written for Horovod: it knows nothing of dualdist. See test_compat.py."""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

NUMBERS = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")
before = [os.environ.get(f"HOROVOD_{name}") for name in NUMBERS]

import horovod  # noqa: E402
import horovod.torch as hvd  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.utils.data  # noqa: E402
from horovod.common.exceptions import HorovodInternalError  # noqa: E402
from horovod.common.util import gloo_built  # noqa: E402
from horovod.torch.compression import Compression  # noqa: E402
from horovod.torch.mpi_ops import allreduce_async_, synchronize  # noqa: E402

EXAMPLES = [1.0, 2.0, 3.0, 4.0]


class Examples(torch.utils.data.Dataset[Any]):
    """Numbers, each with the module that its process finds under Horovod's name."""

    def __len__(self) -> int:
        return len(EXAMPLES)

    def __getitem__(self, place: int) -> tuple[float, str]:
        return EXAMPLES[place], hvd.allreduce.__module__


def main(folder: str) -> None:
    hvd.init()
    dataset = Examples()
    sampler: Any = torch.utils.data.distributed.DistributedSampler(
        dataset, num_replicas=hvd.size(), rank=hvd.rank(), shuffle=False
    )
    spawn: dict[str, Any] = {"num_workers": 1, "multiprocessing_context": "spawn"}
    workers = spawn if "--worker" in sys.argv and hvd.rank() == 0 else {}
    loader = torch.utils.data.DataLoader(dataset, batch_size=1, sampler=sampler, **workers)
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(model.weight, 5.0 - hvd.rank())
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.5)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), compression=Compression.none, op=hvd.Average
    )
    found = set()
    for number, module in loader:
        found.update(module)
        optimizer.zero_grad()
        model(number.float().view(1, 1)).sum().backward()
        optimizer.step()
    total = torch.tensor([float(hvd.rank())])
    assert synchronize(allreduce_async_(total, op=hvd.Sum, name="total")) is total
    assert hvd.mpi_ops.is_homogeneous() and gloo_built() and issubclass(HorovodInternalError, RuntimeError)
    try:
        importlib.import_module("horovod.tensorflow")
    except ImportError as error:
        refusal = str(error)
    dualdist: Any = sys.modules["dualdist"]
    told = {
        "main": [__name__, os.path.basename(__file__), os.path.isabs(__file__), sys.argv[2:]],
        "path": sys.path[0],
        "before": before,
        "after": [os.environ[f"HOROVOD_{name}"] for name in NUMBERS],
        "numbers": [getattr(hvd, name.lower())() for name in NUMBERS],
        "found": [horovod.__version__, hvd.allreduce.__module__, *found],
        "refusal": refusal,
        "weight": model.weight.item(),
        "total": total.item(),
        "runs": [dualdist.backend_name(), dualdist.launcher_name()],
    }
    make_own_group()
    Path(folder, f"{hvd.rank()}.json").write_text(json.dumps(told))


def make_own_group() -> None:
    """Make a group of torch, which such a script does not find, and join the world again."""
    assert os.environ["HOROVOD_HOSTNAME"]
    assert not dist.is_initialized()
    dist.init_process_group("gloo")  # finds torchrun's variables
    total = hvd.allreduce(torch.ones(1), op=hvd.Sum)
    dist.all_reduce(total)
    assert total.item() == hvd.size() ** 2
    dist.destroy_process_group()
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()
    hvd.shutdown()
    hvd.init()
    assert not dist.is_initialized()
    assert hvd.allgather_object(hvd.rank()) == list(range(hvd.size()))


if __name__ == "__main__":
    main(sys.argv[1])
