"""Metrics over all samples of all ranks: counters that are reduced once, and outputs in the order of the dataset."""

from __future__ import annotations

from .counters import ConfusionMatrix, Mean, Metric, Sum, compute
from .gathering import gather_all_tensors, gather_in_order

__all__ = ("ConfusionMatrix", "Mean", "Metric", "Sum", "compute", "gather_all_tensors", "gather_in_order")
