"""DistributedDataParallel(mixed_precision=), as in torch: forward computes with casts of the parameters.

Each forward casts every parameter once and puts the casts in the places of the parameters; they are put back after
it. Autograd then casts the gradients back, so that the parameters and their gradients keep their dtype for the
optimizer. torch's own class exchanges the data of the parameters until backward instead, on a stream that only
accelerators have (torch/nn/parallel/distributed.py:1103).

Checkpointed parts run again in backward, without the module around them: hooks on every part then cast.
"""

from __future__ import annotations

import functools
from collections.abc import Collection
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from ..core.checks import wrong
from ..core.collectives.reduction import Compression, Compressor
from ..core.compiling import not_compiled

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
    """Casts the buffers of a module once, and its parameters and inputs for each forward."""

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
        """Return `inputs` with the floating-point tensors in it cast, as torch does. A forward begins."""
        self.restore()  # what was interrupted in a backward
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
            self.restore()

    def _replace(self, prefix: str, part: torch.nn.Module) -> None:
        cast = functools.cache(self._cast)  # a parameter may be in several places
        for place, owner in part.named_modules(prefix=prefix):
            places: dict[str, Any] = owner._parameters
            for name, param in places.items():
                if param is not None and f"{place}.{name}".lstrip(".") not in self._ignored:
                    self._replaced.append((places, name, param))
                    places[name] = cast(param)

    def restore(self) -> None:
        """Put the parameters back. Hooks of torch do so, except after a KeyboardInterrupt."""
        while self._replaced:
            places, name, param = self._replaced.pop()
            places[name] = param
        self._outermost, self._depth = None, 0
