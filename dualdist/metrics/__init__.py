"""Metrics over the samples of all ranks: counters added up by one allreduce, and outputs in dataset order."""

from __future__ import annotations

from .counters import ConfusionMatrix, Mean, Metric, Sum, compute
from .gathering import gather_all_tensors, gather_in_order

__all__ = ("ConfusionMatrix", "Mean", "Metric", "Sum", "compute", "gather_all_tensors", "gather_in_order")
