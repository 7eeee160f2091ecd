"""Starting the processes of `dualdist run` and `dualdist.spawn`, and ending them everywhere. Imports no torch."""
