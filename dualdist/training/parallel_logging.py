"""The facts about a wrapper that torch's DistributedDataParallel._get_ddp_logging_data returns."""

from __future__ import annotations

from typing import Any

import torch

from ..world.context import current
from .sync_batch_norm import SyncBatchNorm

__all__ = ("logging_data",)


def logging_data(wrapper: Any) -> dict[str, Any]:
    """Return them by torch's names (torch/csrc/distributed/c10d/logger.cpp). Local."""
    context = current()
    params = [param for _, param in wrapper._named() if param.requires_grad]
    batch_norms = (SyncBatchNorm, torch.nn.SyncBatchNorm)
    hook = wrapper._combiner.comm_hook
    facts = {} if hook is None else {"comm_hook": hook.name}
    return {
        **facts,
        "world_size": context.world.size,
        "rank": context.world.rank,
        "module_name": type(wrapper.module).__name__,
        "device_ids": ", ".join(str(device.index or 0) for device in wrapper.device_ids or ()),
        "output_device": -1 if wrapper.output_device is None else str(wrapper.output_device),
        "backend_name": context.backend.transport,
        "broadcast_buffers": int(wrapper.forward_sync_buffers),
        "bucket_cap_bytes": wrapper.bucket_bytes_cap,
        "find_unused_parameters": int(wrapper.find_unused_parameters),
        "gradient_as_bucket_view": int(wrapper.gradient_as_bucket_view),
        "static_graph": int(wrapper.static_graph),
        "has_sync_bn": int(any(isinstance(part, batch_norms) for part in wrapper.module.modules())),
        "num_parameter_tensors": len(params),
        "total_parameter_size_bytes": sum(param.numel() * param.element_size() for param in params),
        "dtypes": ", ".join(sorted({str(param.dtype).removeprefix("torch.") for param in params})),
        "is_multi_device_module": int(wrapper.is_multi_device_module),
    }
