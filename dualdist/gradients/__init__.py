"""Combining the gradients of all ranks while backward runs."""
