"""Starting processes: `dualdist run` (job.py), `dualdist.run` and `dualdist.spawn` (function.py).

All hand their processes to a Supervisor (agent_connection.py), which starts one agent per host and ends the processes
everywhere. The agent (agent.py) starts the processes of its host, and sends them the signals that end them.
"""
