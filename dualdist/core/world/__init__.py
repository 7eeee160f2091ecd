"""The world that this process has joined: its numbers, its process sets, and queries about its backend."""
