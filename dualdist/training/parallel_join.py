"""Training with different numbers of batches on the ranks, behind DistributedDataParallel."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from ..backends.torch_interface import disabled_join, join_hook
from ..checks import flag
from ..collectives.allreduce import allreduce
from ..collectives.join import join, share_grad_scaler
from ..gradients.combiner import Combiner
from ..types import Max, Sum
from ..world.process_sets import ProcessSet, global_process_set
from ..world.ranks import rank, size
from .parallel_interface import TorchInterface

__all__ = ("JoinInterface", "JoinedTraining")


class JoinedTraining:
    """What a wrapper does in the block of `join`, and after it."""

    def __init__(self, combiner: Combiner, *, divides_by_active: bool = False, throws: bool = False) -> None:
        """Start the block. throws: whether every rank raises as soon as one has no more data."""
        self._combiner = combiner
        self._throws = throws
        self.in_join: Callable[[], None] = lambda: None
        """Called before each forward in a Join of torch. Collective."""
        combiner.divide_by_active(divides_by_active)

    def before_forward(self) -> None:
        """Raise RuntimeError if another rank has no more data and `throws` is set; that is collective."""
        if self._throws and self._count_active(True) < size():
            self._throw()

    def end(self) -> int:
        """Take part for the others until all have left the block. Return the rank that left last. Collective."""
        if self._throws and self._count_active(False):
            self._throw()
        return join()

    def torch_hook(
        self, at_end: Callable[[int], None], process_set: ProcessSet, kwargs: Mapping[str, Any]
    ) -> Any:
        """Return a JoinHook of torch.

        at_end: called with the rank that joined last, on each member of `process_set`. kwargs: those of Join.
        """
        divides_by_active = not flag(
            "divide_by_initial_world_size", kwargs.get("divide_by_initial_world_size", True)
        )

        def count(is_active: bool) -> None:
            if divides_by_active:
                self._combiner.divide_by(self._count_active(is_active, process_set))

        def shadow() -> None:
            count(False)
            self._combiner.shadow()

        def end(is_last: bool) -> None:
            candidate = torch.tensor([rank() if is_last else -1])
            at_end(int(allreduce(candidate, op=Max, name="join.last", process_set=process_set)))

        self.in_join = functools.partial(count, True)
        return join_hook(shadow, end)

    def _count_active(self, is_active: bool, process_set: ProcessSet = global_process_set) -> int:
        active = torch.tensor([int(is_active)])
        return int(allreduce(active, op=Sum, name="join.active", process_set=process_set))

    def _throw(self) -> None:
        raise RuntimeError("Detected at least one rank that exhausted inputs. Throwing across all ranks.")


class JoinInterface(TorchInterface):
    """The part of DistributedDataParallel for uneven inputs."""

    _joined: JoinedTraining | None
    _torch_join: JoinedTraining | None
    _join_config: Any
    _join_hook: Callable[[], Any]
    """Returns torch's Join hook while the context exists."""

    @contextlib.contextmanager
    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Iterator[None]:
        """Train with different numbers of batches: a rank that leaves the `with` block still takes part for the others.

        It contributes zeros to their backward passes. Buffers are not broadcast in the block. At the end every rank has
        the parameters and buffers of the rank that left last. Collective over the world.

        Args:
            divide_by_initial_world_size: True: averages divide by the size of the world. False: by the number of ranks
                that are still in the block.
            enable: False: do nothing.
            throw_on_early_termination: when one rank has no more data, raise RuntimeError on every rank instead. Each
                forward then exchanges a message.

        Raises ValueError when `process_group` is not the whole world.
        """
        by_all = flag("divide_by_initial_world_size", divide_by_initial_world_size)
        throws = flag("throw_on_early_termination", throw_on_early_termination)
        if not flag("enable", enable):
            yield
            return
        if self._process_set is not global_process_set:
            raise ValueError(
                "`process_group` must be the whole world for join(), but is another process set instead."
            )
        self._joined = JoinedTraining(self._combiner, divides_by_active=not by_all, throws=throws)
        try:
            yield
            self._overwrite(self._joined.end())
        finally:
            self._combiner.divide_by_active(False)
            self._joined = None

    def join_hook(self, **kwargs: Any) -> Any:
        """Return what torch.distributed.algorithms.Join calls on a rank without more data."""
        self._torch_join = JoinedTraining(self._combiner)

        def end(root_rank: int) -> None:
            self._overwrite(root_rank)
            share_grad_scaler(root_rank, self._process_set)
            self._forget_join()

        hook = self._torch_join.torch_hook(end, self._process_set, kwargs)
        self._join_hook = weakref.ref(hook)
        return hook

    def _forget_join(self) -> None:
        """Leave a Join context of torch, which leaves its configuration in what has joined."""
        self._torch_join, self._join_config = None, disabled_join()
        self._combiner.divide_by(None)

    def _overwrite(self, root_rank: int) -> None:
        """Overwrite parameters and buffers with those of rank `root_rank`. Collective."""
        self._broadcast(
            dict(self._named()) | (self._named_buffers() if self.forward_sync_buffers else {}), root_rank
        )
