"""Starting the processes of `dualdist run` (run.py), `dualdist.run` (run_function.py) and `dualdist.spawn` (spawn.py).

All hand their processes to a Supervisor (supervisor.py), which starts one agent per host and ends the processes
everywhere. The agent (agent.py) starts the processes of its host, and sends them the signals that end them.
"""
