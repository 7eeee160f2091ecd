"""Checkpoints as files: writing, verifying, finding and deleting them."""
