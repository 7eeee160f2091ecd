"""The arguments of DistributedDataParallel: their checks, `mixed_precision`, hooks for buffers, and what it logs."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel as TorchDataParallel
from torch.utils._pytree import tree_map_only

from ..accelerator import checked_device
from ..backends.torch_interface import DeviceMesh
from ..checks import flag, instance, is_dtensor, items, number, wrong
from ..collectives.reduction import Compression, Compressor
from ..compiling import not_compiled
from ..gradients.combiner import OPTIMIZER, CommHook, combiners_of
from ..world.context import current
from ..world.process_sets import ProcessSet, checked_process_set, global_process_set
from .parameters import check_sync_batch_norms


def set_of_group_or_mesh(process_group: Any, device_mesh: Any) -> ProcessSet:
    """Return the process set that one of the two arguments means. Raises ValueError if there are two, or TypeError."""
    if device_mesh is None and process_group is None:
        return global_process_set
    if device_mesh is None:
        return checked_process_set(process_group, "process_group", registered=True)
    if process_group is not None:
        raise ValueError(
            "`device_mesh` must be None if `process_group` is passed, but is not. Pass one of them."
        )
    instance("device_mesh", device_mesh, DeviceMesh, "a DeviceMesh of one dimension", "Pass mesh['data'].")
    return checked_process_set(device_mesh, "device_mesh")


def checked_module(module: Any, ignored: set[str]) -> list[tuple[str, torch.nn.Parameter]]:
    """Return the named parameters of `module` that are not `ignored`. Raises as DistributedDataParallel does."""
    instance("module", module, torch.nn.Module, "a torch.nn.Module", "Pass the model.")
    for part in module.modules():
        if isinstance(part, TorchDataParallel):
            raise TypeError(
                "`module` must not be distributed already, but it or a part of it is. Wrap the whole model once."
            )
        if isinstance(part, torch.nn.DataParallel):
            raise TypeError(
                "`module` must not be a torch.nn.DataParallel or have one, since each process trains on one device, "
                "but it does. Pass its `module` instead."
            )
    named = [(name, param) for name, param in module.named_parameters() if name not in ignored]
    for name, param in named:
        if is_dtensor(param):
            raise TypeError(
                f"`module` must have plain parameters, but {name!r} is a DTensor. Models that fully_shard or "
                "parallelize_module has changed exchange gradients themselves."
            )
        if isinstance(param, torch.nn.parameter.UninitializedParameter):
            raise RuntimeError(
                f"`module` must have initialized parameters, but {name!r} has no shape yet. Run a forward first."
            )
    if not any(param.requires_grad for _, param in named):
        raise RuntimeError(
            "`module` must have a parameter that requires a gradient, but has none. Use it without a wrapper."
        )
    if any(other.kind is OPTIMIZER for other in combiners_of([param for _, param in named])):
        raise TypeError(
            f"`module` must not have parameters of a {OPTIMIZER}, but does. Use either style, not both for "
            "one model."
        )
    check_sync_batch_norms(module.modules())
    return named


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
    if broadcast is not None and forward_sync is not None:
        _warn(
            "`broadcast_buffers` is ignored, because `forward_sync_buffers` replaces it. Pass only the latter."
        )
    elif broadcast is not None and is_deprecated:
        _warn(
            "`broadcast_buffers` is deprecated in torch. Use `forward_sync_buffers`; buffers are then always copied at "
            "the start."
        )
    return (both, both) if forward_sync is None else (True, flag("forward_sync_buffers", forward_sync))


def _warn(text: str) -> None:
    warnings.warn(text, FutureWarning, stacklevel=5)


def checked_caps(caps: Any) -> list[float]:
    """Return the sizes in `bucket_cap_mb_list`; none if it is None."""
    if caps is None:
        return []
    rule = "a list of sizes in MiB"
    given = items("bucket_cap_mb_list", caps, rule)
    if not given:
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
        raise ValueError(
            f"`{given}` must be passed with the other of the two arguments, but is passed alone."
        )
    own = {id(param) for param in module.parameters()}
    for entry in items(name, () if delayed is None else delayed, rule):
        if not isinstance(entry, tuple | list) or len(entry) != 2 or id(entry[1]) not in own:
            raise wrong(name, rule, entry)


# DistributedDataParallel(mixed_precision=), as in torch: forward computes with casts of the parameters.
#
# Each forward casts every parameter once and puts the casts in the places of the parameters; they are put back after
# it. Autograd then casts the gradients back, so that the parameters and their gradients keep their dtype for the
# optimizer. torch's own class exchanges the data of the parameters until backward instead, on a stream that only
# accelerators have (torch/nn/parallel/distributed.py:1103).
#
# Checkpointed parts run again in backward, without the module around them: hooks on every part then cast.

_COMPRESSION: dict[torch.dtype | None, type[Compressor]] = {
    None: Compression.none,
    torch.float16: Compression.fp16,
    torch.bfloat16: Compression.bf16,
    torch.float32: Compression.none,
}
"""How gradients are sent in each dtype."""


def checked_mixed_precision(config: Any) -> Any:
    """Return `config`, the argument `mixed_precision`. Raises TypeError or ValueError."""
    names = ("param_dtype", "reduce_dtype", "buffer_dtype")
    if config is not None and not all(hasattr(config, name) for name in names):
        rule = "a torch.nn.parallel.distributed._MixedPrecision"
        fix = "Or use torch.autocast, with torch.amp.GradScaler for float16."
        raise wrong("mixed_precision", rule, config, fix, TypeError)
    for name in names if config is not None else ():
        dtype = getattr(config, name)
        if dtype not in _COMPRESSION:
            raise wrong(f"mixed_precision.{name}", "torch.float16, bfloat16, float32 or None", dtype)
    return config


def reduction_of(config: Any) -> type[Compressor]:
    """Return how gradients are sent: as `reduce_dtype`, or as `param_dtype` if that is None."""
    if config is None:
        return Compression.none
    return _COMPRESSION[config.reduce_dtype or config.param_dtype]


class MixedPrecision:
    """Casts the buffers of a module once, and its parameters and inputs for each forward.

    A context manager around a forward, so that the parameters are also put back after a KeyboardInterrupt.
    """

    def __init__(self, module: torch.nn.Module, config: Any, ignored: Collection[str]) -> None:
        """ignored: names of parameters and buffers that keep their dtype."""
        self._dtype = config.param_dtype
        self._ignored = frozenset(ignored)
        self._outermost: torch.nn.Module | None = None
        """The part of the module that computes with casts now, with all its parts."""
        self._depth = 0
        """How many calls of `_outermost` have not returned: a module may call itself."""
        self._replaced: list[tuple[dict[str, Any], str, Any]] = []
        """Each place of a parameter, its name there, and the parameter."""
        for name, buffer in module.named_buffers():
            if buffer.is_floating_point() and name not in self._ignored:
                buffer.data = buffer.to(config.buffer_dtype)
        for prefix, part in module.named_modules():
            before = functools.partial(self._before_forward, prefix)
            part.register_forward_pre_hook(before, prepend=True)
            part.register_forward_hook(self._after_forward, always_call=True)

    def cast_inputs(self, inputs: Any) -> Any:
        """Return `inputs` with the floating-point tensors in it cast, as torch does."""
        return tree_map_only(torch.Tensor, self._cast, inputs)

    def _cast(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self._dtype) if tensor.is_floating_point() else tensor

    @not_compiled
    def _before_forward(self, prefix: str, part: torch.nn.Module, inputs: Any) -> None:
        if self._outermost is None:
            self._outermost = part
            self._replace(prefix, part)
        self._depth += part is self._outermost

    @not_compiled
    def _after_forward(self, part: torch.nn.Module, inputs: Any, outputs: Any) -> None:
        self._depth -= part is self._outermost
        if not self._depth:
            self._restore()

    def _replace(self, prefix: str, part: torch.nn.Module) -> None:
        casts: dict[int, torch.Tensor] = {}
        for place, owner in part.named_modules(prefix=prefix):
            for name, param in owner._parameters.items():
                if param is None or f"{place}.{name}".lstrip(".") in self._ignored:
                    continue
                if id(param) not in casts:
                    casts[id(param)] = self._cast(param)
                places: dict[str, Any] = owner._parameters
                self._replaced.append((places, name, param))
                places[name] = casts[id(param)]

    def _restore(self) -> None:
        while self._replaced:
            places, name, param = self._replaced.pop()
            places[name] = param
        self._outermost, self._depth = None, 0

    def __enter__(self) -> None:
        self._restore()

    def __exit__(self, *_: object) -> None:
        self._restore()


@dataclass
class BufferHook:
    """A hook of the user that synchronizes buffers in place of copying rank 0's, and its state."""

    hook: Callable[[Any, dict[str, torch.Tensor]], Any]
    """hook(state, buffers) changes the buffers in place. It may return futures."""
    state: Any
    after_forward: bool
    """Whether it is called after forward, not before."""
    _futures: list[Any] = field(default_factory=list)

    def run(self, buffers: Mapping[str, torch.Tensor]) -> None:
        """Call the hook. Collective if the hook is."""
        self.wait()
        with torch.no_grad():
            self._futures = list(self.hook(self.state, dict(buffers)) or ())

    def wait(self) -> None:
        """Wait for the futures that the hook has returned."""
        while self._futures:
            self._futures.pop(0).wait()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_futures": []}


def logged_facts(wrapper: Any, comm_hook: CommHook | None) -> dict[str, Any]:
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
