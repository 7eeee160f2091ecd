"""The command `dualdist exec` and `init_method="dualdist://"`: the variables of torchrun under any launcher."""
