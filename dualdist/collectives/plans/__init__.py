"""Plans, one file per collective: the checks of its arguments, the Call to agree on, and what to do after that.

A plan knows nothing of autograd. The public functions beside this folder run plans, and so do their gradients in
collectives/autograd.py.
"""
