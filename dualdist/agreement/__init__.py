"""How the members of a process set agree on each collective before its data moves."""
