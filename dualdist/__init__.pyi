"""The public names of the package. `__init__.py` reads them here, and imports each at its first use."""

from . import (
    checkpoint as checkpoint,
    elastic as elastic,
    lr as lr,
    metrics as metrics,
    samplers as samplers,
    seeding as seeding,
)
from .core.collectives.allgather import (
    allgather as allgather,
    allgather_async as allgather_async,
    grouped_allgather as grouped_allgather,
    grouped_allgather_async as grouped_allgather_async,
)
from .core.collectives.allreduce import (
    allreduce as allreduce,
    allreduce_ as allreduce_,
    allreduce_async as allreduce_async,
    allreduce_async_ as allreduce_async_,
    grouped_allreduce as grouped_allreduce,
    grouped_allreduce_ as grouped_allreduce_,
    grouped_allreduce_async as grouped_allreduce_async,
    grouped_allreduce_async_ as grouped_allreduce_async_,
)
from .core.collectives.alltoall import alltoall as alltoall, alltoall_async as alltoall_async
from .core.collectives.broadcast import (
    broadcast as broadcast,
    broadcast_ as broadcast_,
    broadcast_async as broadcast_async,
    broadcast_async_ as broadcast_async_,
)
from .core.collectives.join import barrier as barrier, join as join
from .core.collectives.objects import allgather_object as allgather_object, broadcast_object as broadcast_object
from .core.collectives.plan import poll as poll, synchronize as synchronize
from .core.collectives.reduction import Compression as Compression
from .core.collectives.reducescatter import (
    grouped_reducescatter as grouped_reducescatter,
    grouped_reducescatter_async as grouped_reducescatter_async,
    reducescatter as reducescatter,
    reducescatter_async as reducescatter_async,
)
from .core.lifecycle import (
    backend_name as backend_name,
    cross_rank as cross_rank,
    cross_size as cross_size,
    device as device,
    init as init,
    is_homogeneous as is_homogeneous,
    launch_info as launch_info,
    launcher_name as launcher_name,
    local_rank as local_rank,
    local_size as local_size,
    rank as rank,
    shutdown as shutdown,
    size as size,
    transport_name as transport_name,
)
from .errors import (
    BackendUnavailableError as BackendUnavailableError,
    CheckpointError as CheckpointError,
    CollectiveMismatchError as CollectiveMismatchError,
    ConfigurationError as ConfigurationError,
    DamagedCheckpointError as DamagedCheckpointError,
    HorovodInternalError as HorovodInternalError,
    HostsUpdatedInterrupt as HostsUpdatedInterrupt,
    NotInitializedError as NotInitializedError,
    ProcessEndedError as ProcessEndedError,
    ReplicaMismatchError as ReplicaMismatchError,
    StallError as StallError,
    WorldMismatchError as WorldMismatchError,
)
from .built import (
    ccl_built as ccl_built,
    cuda_built as cuda_built,
    ddl_built as ddl_built,
    gloo_built as gloo_built,
    gloo_enabled as gloo_enabled,
    mpi_built as mpi_built,
    mpi_enabled as mpi_enabled,
    mpi_threads_supported as mpi_threads_supported,
    nccl_built as nccl_built,
    rocm_built as rocm_built,
)
from .comm_hooks import CommHookState as CommHookState
from .replicas import check_replicas as check_replicas
from .observation.world import report as report, start_timeline as start_timeline, stop_timeline as stop_timeline
from .rooted_collectives import (
    gather as gather,
    gather_object as gather_object,
    reduce as reduce,
    scatter as scatter,
    scatter_object as scatter_object,
)
from .processes.function import run as run, spawn as spawn
from .samplers import DistributedSampler as DistributedSampler, split_by_rank as split_by_rank
from .seeding import seed_everything as seed_everything
from .sparse_allreduce import sparse_allreduce_async as sparse_allreduce_async
from .sharding.meshes import device_mesh as device_mesh
from .core.training.optimizer import (
    DistributedOptimizer as DistributedOptimizer,
    SynchronizedOptimizer as SynchronizedOptimizer,
)
from .core.training.optimizer_state import broadcast_optimizer_state as broadcast_optimizer_state
from .torch_ddp.module import DistributedDataParallel as DistributedDataParallel
from .core.training.parameters import broadcast_parameters as broadcast_parameters
from .sync_batch_norm import SyncBatchNorm as SyncBatchNorm
from .core.types import Adasum as Adasum, Average as Average, Max as Max, Min as Min, Product as Product, Sum as Sum
from .core.world import (
    ProcessSet as ProcessSet,
    add_process_set as add_process_set,
    global_process_set as global_process_set,
    is_initialized as is_initialized,
    remove_process_set as remove_process_set,
)

__all__: tuple[str, ...]
__version__: str
