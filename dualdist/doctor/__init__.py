"""The command `dualdist doctor`: what was detected, what can start here, and how the links of a world are."""
