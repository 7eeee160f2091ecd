"""Starting the processes of `dualdist run` (run.py) and `dualdist.spawn` (spawn.py), and ending them everywhere.

Both hand their processes to a Supervisor (supervisor.py), which starts one agent per host. The agent
(agent.py) starts the processes of its host, and sends them the signals that end them.
"""
