"""Checkpoints as files: how they are written, verified, found and deleted."""
