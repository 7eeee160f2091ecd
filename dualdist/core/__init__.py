"""The layer that stands alone: it imports nothing of the other folders, which all stand on it."""
