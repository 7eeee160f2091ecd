"""What a checkpoint holds: from live objects to plain values, and back."""
