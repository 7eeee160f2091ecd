"""Combining the gradients of all ranks while backward runs.

A wrapper has a Combiner (combiner.py). Usually it is a GradSync (grad_sync.py), which decides when to combine. Its
hooks report each gradient to Arrivals (arrivals.py), which knows the expected order. Its Reducer (reducer.py) sends and
receives buckets, whose memory is in bucket_memory.py. Communication hooks of the user and the comparison of
replicas are outside of the core.
"""
