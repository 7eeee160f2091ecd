"""Starting processes: `dualdist run` (command.py), `dualdist.run` and `dualdist.spawn` (function.py).

All start a job (job.py), which has one agent per host (agent.py), and ends the processes everywhere.
"""
