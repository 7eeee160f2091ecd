"""The command `dualdist parity`: where and why two ways to run a training script first differ."""
