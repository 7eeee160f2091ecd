"""What the ranks agree on before each collective, and what they find out when one of them is missing.

A collective is a Call of a Kind (call.py). A Channel (channel.py) runs the calls of one process set, in the guard
(guard.py). Before each call it asks whether all members make the same one, over sockets between the members (`agree` in
connections.py). If they do not, `match` decides which pending calls run or raise (matching.py). What others see of a
call is in guard.py: the ranks that are missing in a stall, and when a call ran (dualdist/observation).
"""
