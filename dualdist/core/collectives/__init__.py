"""The collectives, under Horovod's names, on any backend: one file per collective.

Each file has the plan of its collective, the public functions, and the gradient. plan.py says what a plan is;
reduction.py and wire.py do the work on a Group.
"""
