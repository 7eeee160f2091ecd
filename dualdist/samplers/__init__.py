"""Which samples each rank gets: torch's sampler with exact evaluation and resume, any other sampler, and iterables.

One global sequence is dealt out in turns: of what is left of it, rank r takes every `num_replicas`-th item, from the
r-th on. So for equal global batch sizes, step k of all ranks together consists of the same samples whatever the size of
the world, and how far the ranks have come is one number, which holds for another world as well.
"""

from __future__ import annotations

from .dealing import DealingSampler
from .distributed import DistributedSampler
from .iterable import split_by_rank
from .wrapper import DistributedSamplerWrapper

__all__ = ("DealingSampler", "DistributedSampler", "DistributedSamplerWrapper", "split_by_rank")
