"""Plans, one file per collective: the checks of its arguments, the Call to agree on, and what to do after that.

Plans do not use autograd. The public functions in collectives/ and the gradients in collectives/autograd.py run plans.
"""
