"""What is in a checkpoint: which values, under which names, and how they return to their owners."""
