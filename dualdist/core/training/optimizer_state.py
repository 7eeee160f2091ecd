"""Equal optimizer state on all ranks, bit for bit.

`Optimizer.load_state_dict` casts the tensors of a state to the dtype of their parameter, and rebuilds containers and
even strings. So a rank that loads the state of another one would not have the same, but, for example, float32 master
weights in bfloat16. Hooks around the loading therefore keep the state away from torch, and set it unchanged.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch.utils._pytree import tree_leaves, tree_map_only, tree_map_with_path

from ..checks import instance, is_dtensor
from ..collectives.objects import BROADCAST_OBJECT, broadcast_object, if_all_succeed
from ..collectives.plan import channel_and_root
from ..compiling import not_compiled
from ..gradients.buckets import has_numbers
from ..lifecycle import rank
from ..world import current, global_process_set, reporting
from .optimizer import SynchronizedOptimizer
from .parameters import BROADCAST_PARAMETERS, broadcast_parameters, in_batches


@not_compiled
def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int, model: torch.nn.Module | None = None
) -> None:
    """Overwrite the state and the options (lr, betas ...) of `optimizer` with those of rank `root_rank`, bit by bit.

    Dtypes and types become the root's, too. Tensors are on the CPU where the root's are, else on the device of their
    parameter. It takes no step to create state, so weights and step counts do not change. Works for every optimizer,
    including LBFGS and optimizers without state. If the root's has no state, parameters of a DistributedOptimizer that
    have no gradient get zeros, as in Horovod. Collective over the world.

    Args:
        optimizer: its parameters must be equal in number and shape on all ranks.
        model: accepted as in Horovod (horovod/torch/functions.py:68), without effect.

    Raises:
        TypeError: `optimizer` is something else, or has DTensors as parameters.
        ValueError: `root_rank` is not a rank, or the class of `optimizer` or its number of parameters differs from the
            root's. Then the other ranks raise RuntimeError.
        HorovodInternalError: as for `broadcast`.
    """
    sent: dict[int, torch.Tensor] = {}

    def exchange() -> Any:
        with reporting(BROADCAST_OBJECT, global_process_set):  # hooks of the user may fail, too
            fix = "Pass the optimizer of this rank."
            instance("optimizer", optimizer, torch.optim.Optimizer, "a torch.optim.Optimizer", fix)
            _, root, _ = channel_and_root(global_process_set, root_rank)
            if any(is_dtensor(param) for group in optimizer.param_groups for param in group["params"]):
                raise TypeError(
                    "`optimizer` must have plain parameters, but has DTensors, of whose state each rank has its own "
                    "part. A new optimizer needs no broadcast; a checkpoint gives each rank its part."
                )
            state = optimizer.state_dict() if rank() == root else None
            if state is not None and not {"state", "param_groups"} <= set(state):
                raise ValueError(
                    "`optimizer` must have 'state' and 'param_groups' in its state_dict(), as any of torch has, but "
                    f"{type(optimizer).__name__} has {list(state)} instead. Send it by broadcast_object()."
                )
            sent.update(_tensors_in(state))
            stand_ins = {
                key: _alike(_empty(leaf, "meta"), leaf) if _is_plain(leaf) else leaf.detach().cpu()
                for key, leaf in sent.items()
            }
            template = tree_map_only(torch.Tensor, lambda leaf: stand_ins[id(leaf)], state)
        sizes = ", ".join(str(len(group["params"])) for group in optimizer.param_groups)
        own = f"{type(optimizer).__name__} with groups of {sizes} parameters"
        message = own, template, [leaf.device.type for leaf in sent.values()]
        roots, *received = broadcast_object(message, root)
        if roots != own:
            raise ValueError(
                f"`optimizer` must be {roots} as on rank {root}, but is {own} instead. Make the same optimizer on "
                "every rank."
            )
        return root, *received

    root_rank, template, all_kinds = if_all_succeed(exchange, RuntimeError)
    if isinstance(optimizer, SynchronizedOptimizer) and not template["state"]:
        params = [param for param in optimizer._combiner.params() if param.grad is None]
        optimizer._combiner.fill(frozenset())
        for param in params:
            if param.grad is not None:
                _replace_by_sparse(param)
    bound = current().backend.device
    kind = None if bound is None else bound.type
    if rank() == root_rank:
        for part in _parts(leaf.detach() for leaf in sent.values() if _is_plain(leaf)):
            with _reporting_lack_of_memory():
                data = [leaf.to(bound) if leaf.device.type == kind else leaf.cpu() for leaf in part]
            broadcast_parameters(data, root_rank)
            del data  # before the next part is copied
        return
    leaves = _tensors_in(template)
    devices = {
        id(leaf): param.device
        for group, saved in zip(optimizer.param_groups, template["param_groups"], strict=True)
        for param, number in zip(group["params"], saved["params"], strict=True)
        for leaf in tree_leaves(template["state"].get(number))
    }
    first = next(param.device for group in optimizer.param_groups for param in group["params"])
    kinds = dict(zip(leaves, all_kinds, strict=True))

    def placed(data: torch.Tensor, leaf: torch.Tensor) -> torch.Tensor:
        key = id(leaf)
        return _alike(data if kinds[key] == "cpu" else data.to(devices.get(key, first)), leaf)

    found = {key: placed(leaf, leaf) for key, leaf in leaves.items() if not leaf.is_meta}
    for part in _parts(leaf for leaf in leaves.values() if leaf.is_meta):
        with _reporting_lack_of_memory():
            received = [_empty(leaf, bound if kinds[id(leaf)] == kind else "cpu") for leaf in part]
        broadcast_parameters(received, root_rank)
        with _reporting_lack_of_memory():
            found |= {id(leaf): placed(data, leaf) for data, leaf in zip(received, part, strict=True)}
    state = tree_map_only(torch.Tensor, lambda leaf: found[id(leaf)], template)
    load_optimizer_state(optimizer, state, keeps_cpu=True)


def _replace_by_sparse(param: torch.Tensor) -> None:
    """Let a sparse gradient replace the zeros of `param`, in the next backward.

    torch may lose a sparse gradient that it adds to a dense one with rows of one number (seen in 2.15).
    """
    reference, zeros = weakref.ref(param), weakref.ref(cast(torch.Tensor, param.grad))

    @not_compiled
    def replace(grad: torch.Tensor) -> None:
        handle.remove()
        param = reference()
        if grad.is_sparse and param is not None and param.grad is zeros() and not has_numbers(param.grad):
            param.grad = None

    handle = param.register_hook(replace)


def _reporting_lack_of_memory() -> contextlib.AbstractContextManager[None]:
    """If memory runs out in the `with` block, let the other ranks raise, too: they would wait for the next part."""
    return reporting(BROADCAST_PARAMETERS, global_process_set)


def _tensors_in(state: Any) -> dict[int, torch.Tensor]:
    """Return the tensors by id, so that one that occurs several times stays one tensor on the other ranks, too."""
    return {id(leaf): leaf for leaf in tree_leaves(state) if isinstance(leaf, torch.Tensor)}


def _parts(leaves: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yield some of `leaves` at a time, so that little of a GPU's state is in host memory. Equal on all ranks."""
    return in_batches(leaves, lambda leaf: leaf.nbytes)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether `tensor` can be received into memory. Others, such as sparse ones, are pickled."""
    is_dense = tensor.layout is torch.strided and not tensor.is_quantized
    return is_dense and type(tensor) in (torch.Tensor, torch.nn.Parameter)


def _empty(tensor: torch.Tensor, device: torch.device | str | None) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)


def _alike(data: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Return `data` with the type of `tensor` and its `requires_grad`."""
    made = data.detach().requires_grad_(tensor.requires_grad)
    return torch.nn.Parameter(made, made.requires_grad) if type(tensor) is torch.nn.Parameter else made


def load_optimizer_state(
    optimizer: torch.optim.Optimizer, state_dict: dict[str, Any], *, keeps_cpu: bool = False, copies: bool = False
) -> None:
    """Load `state_dict` into `optimizer`, with dtypes and types as they are in it. Local.

    Hooks and methods of the optimizer's class run as in its `load_state_dict`. The dictionaries of groups and state
    stay the same objects, because schedulers and wrappers refer to them. Tensors move to the device of their parameter
    as in torch, which leaves "step" where it is.

    Args:
        keeps_cpu: leave all tensors that are on the CPU there.
        copies: copy the tensors that do not move. `state_dict` may be the pages of a file, which a host has once.
    """
    groups, state = optimizer.param_groups, optimizer.state
    given: dict[str, Any] = {}

    def withhold(_: Any, loading: dict[str, Any]) -> dict[str, Any]:
        given.update(loading)
        return {**loading, "state": {}}

    def set_state(_: Any) -> None:
        loaded = _placed(optimizer.param_groups, given, keeps_cpu, copies)
        optimizer.__setstate__({"state": loaded, "param_groups": optimizer.param_groups})

    with contextlib.ExitStack() as hooks:
        try:
            # After the pre-hooks of the user, and before the post-hooks.
            hooks.callback(optimizer.register_load_state_dict_pre_hook(withhold).remove)
            hooks.callback(optimizer.register_load_state_dict_post_hook(set_state, prepend=True).remove)
        except AttributeError:  # an optimizer that never called Optimizer.__init__ loads in its own way
            state_dict = copy.deepcopy(state_dict) if copies else state_dict
        try:
            optimizer.load_state_dict(state_dict)
        except BaseException:
            optimizer.param_groups, optimizer.state = groups, state
            raise
    for group, loaded in zip(groups, optimizer.param_groups, strict=True):
        group.update(loaded)
    loaded_state = dict(optimizer.state)
    state.clear()
    state.update(loaded_state)
    optimizer.param_groups, optimizer.state = groups, state


def _placed(
    groups: Sequence[Mapping[str, Any]], given: Mapping[str, Any], keeps_cpu: bool, copies: bool
) -> dict[Any, Any]:
    """Return the state in the state_dict `given` for the parameters of `groups`, each tensor on its device."""
    owners = {
        key: (param, bool(group.get("capturable") or group.get("fused")))
        for group, saved in zip(groups, given["param_groups"], strict=True)
        for key, param in zip(saved["params"], group["params"], strict=True)
    }

    @functools.cache  # so that one tensor stays one
    def moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        if tensor.device == device and not copies:
            return tensor
        return _alike(tensor.detach().to(device, copy=True), tensor)

    def place(path: Sequence[Any], leaf: Any, param: torch.Tensor, moves_step: bool) -> Any:
        is_step = bool(path) and getattr(path[-1], "key", None) == "step"
        if not isinstance(leaf, torch.Tensor):
            return leaf
        stays = (leaf.is_cpu and keeps_cpu) or (is_step and not moves_step)
        return moved(leaf, leaf.device if stays else param.device)

    state: dict[Any, Any] = defaultdict(dict)
    for key, value in given["state"].items():
        if key in owners:
            param, moves_step = owners[key]
            state[param] = tree_map_with_path(functools.partial(place, param=param, moves_step=moves_step), value)
        else:
            state[key] = tree_map_only(torch.Tensor, lambda leaf: moved(leaf, leaf.device), value)
    return state
