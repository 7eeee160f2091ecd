"""The world that this process has joined: its ranks, its process sets, and what can be asked of it."""
