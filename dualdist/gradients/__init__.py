"""Combining the gradients of all ranks while backward runs.

A wrapper has a Combiner (combiner.py). Usually it is a GradSync (grad_sync.py), which decides when to combine. Its
hooks report each gradient to Arrivals (arrivals.py), and its Reducer (reducer.py) sends and receives. The Reducer has a
Layout (layout.py): the buckets, their memory (bucket_memory.py), and the order in which they fill. comm_hook.py has the
communication hooks of the user, and replicas.py compares parameters between ranks.
"""
