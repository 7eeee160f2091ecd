"""The other arguments of DistributedDataParallel, and what it logs."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel as TorchDataParallel

from ..core.accelerator import checked_device
from ..core.checks import flag, instance, items, number, wrong
from ..core.world import ProcessSet, checked_process_set, current, global_process_set


def set_of_group_or_mesh(process_group: Any, device_mesh: Any) -> ProcessSet:
    """Return the process set that one of the two arguments means. Raises ValueError if there are two, or TypeError."""
    if device_mesh is None and process_group is None:
        return global_process_set
    if device_mesh is None:
        return checked_process_set(process_group, "process_group", registered=True)
    if process_group is not None:
        raise ValueError("`device_mesh` must be None if `process_group` is passed, but is not. Pass one of them.")
    instance("device_mesh", device_mesh, DeviceMesh, "a DeviceMesh of one dimension", "Pass mesh['data'].")
    return checked_process_set(device_mesh, "device_mesh")


def checked_device_ids(device_ids: Any, own: set[torch.device]) -> torch.device | None:
    """Return the device in `device_ids`, if any. own: where the module's parameters are.

    As in torch (torch/nn/parallel/distributed.py), a module on the CPU or on several devices takes none. The CPU itself
    is accepted for a module there, because `[hvd.device()]` is right on every host.
    """
    rule, fix = "a list of one device or None", "Pass [hvd.device()]."
    devices = items("device_ids", () if device_ids is None else device_ids, rule, fix)
    if len(devices) > 1:
        raise ValueError(f"`device_ids` must be {rule}, but has {len(devices)} instead. {fix}")
    if not devices:
        return None
    kinds = {device.type for device in own}
    # torch knows no numbers without an accelerator.
    is_elsewhere = type(devices[0]) is int and kinds == {"cpu"}
    device = torch.device("cpu") if is_elsewhere else checked_device("device_ids[0]", devices[0])
    if is_elsewhere or len(own) > 1 or kinds != {device.type}:
        raise ValueError(
            f"`device_ids` must be None unless it is where the module is, but is [{devices[0]}] instead, and its "
            f"parameters are on {', '.join(sorted(map(str, own)))}. Leave it out, or move the module first."
        )
    return device


def checked_buffers(broadcast: Any, forward_sync: Any) -> tuple[bool, bool]:
    """Return whether to copy rank 0's buffers at the start, and before each forward. The rules are torch's (2.13)."""
    both = True if broadcast is None else flag("broadcast_buffers", broadcast)
    is_deprecated = "forward_sync_buffers" in inspect.signature(TorchDataParallel.__init__).parameters
    warn = functools.partial(warnings.warn, category=FutureWarning, stacklevel=4)
    if broadcast is not None and forward_sync is not None:
        warn("`broadcast_buffers` is ignored, because `forward_sync_buffers` replaces it. Pass only the latter.")
    elif broadcast is not None and is_deprecated:
        fix = "Use `forward_sync_buffers`; buffers are then always copied at the start."
        warn(f"`broadcast_buffers` is deprecated in torch. {fix}")
    return (both, both) if forward_sync is None else (True, flag("forward_sync_buffers", forward_sync))


def checked_caps(caps: Any) -> list[float]:
    """Return the sizes in `bucket_cap_mb_list`; none if it is None."""
    rule = "a list of sizes in MiB"
    given = items("bucket_cap_mb_list", () if caps is None else caps, rule)
    if caps is not None and not given:
        raise ValueError(f"`bucket_cap_mb_list` must be {rule}, but is empty instead. Pass at least one.")
    return [number(f"bucket_cap_mb_list[{place}]", cap, above=0) for place, cap in enumerate(given)]


def bucket_groups(caps: Sequence[float], params: Sequence[torch.Tensor]) -> list[list[int]] | None:
    """Return which parameters (by index) share a bucket, None without `caps`.

    caps: MiB of each bucket in the order of backward, that is from the last parameter on; the last cap is repeated.
    """
    if not caps:
        return None
    groups: list[list[int]] = [[]]
    held = 0
    for index in reversed(range(len(params))):
        groups[-1].append(index)
        held += params[index].numel() * params[index].element_size()
        if held >= caps[min(len(groups), len(caps)) - 1] * 2**20:
            groups.append([])
            held = 0
    return [group[::-1] for group in groups[::-1] if group]


def check_delayed(delayed: Any, delayed_until: Any, module: torch.nn.Module) -> None:
    """Check `delay_all_reduce_named_params`, (name, parameter) pairs, and `param_to_hook_all_reduce`."""
    name, rule = "delay_all_reduce_named_params", "a list of (name, parameter) of the module"
    if (delayed is None) != (delayed_until is None):
        given = name if delayed_until is None else "param_to_hook_all_reduce"
        raise ValueError(f"`{given}` must be passed with the other of the two arguments, but is passed alone.")
    own = {id(param) for param in module.parameters()}
    for entry in items(name, () if delayed is None else delayed, rule):
        if not isinstance(entry, tuple | list) or len(entry) != 2 or id(entry[1]) not in own:
            raise wrong(name, rule, entry)


def logged_facts(wrapper: Any, comm_hook: Any) -> dict[str, Any]:
    """Return facts about a DistributedDataParallel by torch's names (torch/csrc/distributed/c10d/logger.cpp). Local."""
    backend, module = current().backend, wrapper.module
    params = [param for _, param in wrapper._named() if param.requires_grad]
    return {
        **({} if comm_hook is None else {"comm_hook": comm_hook.name}),
        "world_size": backend.size,
        "rank": backend.rank,
        "module_name": type(module).__name__,
        "device_ids": ", ".join(str(device.index or 0) for device in wrapper.device_ids or ()),
        "output_device": -1 if wrapper.output_device is None else str(wrapper.output_device),
        "backend_name": backend.transport,
        "broadcast_buffers": int(wrapper.forward_sync_buffers),
        "bucket_cap_bytes": wrapper.bucket_bytes_cap,
        "find_unused_parameters": int(bool(wrapper.find_unused_parameters)),
        "gradient_as_bucket_view": int(bool(wrapper.gradient_as_bucket_view)),
        "static_graph": int(bool(wrapper.static_graph)),
        "has_sync_bn": int(any("SyncBatchNorm" in type(part).__name__ for part in module.modules())),
        "num_parameter_tensors": len(params),
        "total_parameter_size_bytes": sum(param.numel() * param.element_size() for param in params),
        "dtypes": ", ".join(sorted({str(param.dtype).removeprefix("torch.") for param in params})),
        "is_multi_device_module": int(wrapper.is_multi_device_module),
    }
