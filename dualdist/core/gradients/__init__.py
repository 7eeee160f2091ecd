"""Combining the gradients of all ranks while backward runs.

A wrapper has a Combiner (combiner.py). Usually it is a GradSync (grad_sync.py), which decides when to combine. Its
hooks report each gradient to Arrivals (arrivals.py). Its Reducer (reducer.py) sends and receives buckets, which
are in buckets.py, with their memory. Communication hooks of the user, the comparison of replicas,
sparse gradients, and what makes use of the order of arrival are outside of the core.
"""
