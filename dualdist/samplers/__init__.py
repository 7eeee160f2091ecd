"""Which samples each rank gets: from torch's sampler with exact evaluation and resume, another sampler, or an iterable.

One global sequence is sharded in turns: of its remaining items, rank r gets every `num_replicas`-th item, starting at
the r-th. So with equal global batch sizes, step k consists of the same samples in a world of any size. One number, the
offset in the sequence, is enough to resume, also in a world of another size.
"""

from __future__ import annotations

from .distributed import DistributedSampler
from .iterable import split_by_rank
from .sharding import DealingSampler
from .wrapper import DistributedSamplerWrapper

__all__ = ("DealingSampler", "DistributedSampler", "DistributedSamplerWrapper", "split_by_rank")
