"""What combines the gradients of all ranks while backward runs."""
