"""How the ranks of a job meet before any backend runs, and who is missing. Imports no torch.

A meeting has one server (server.py), in rank 0 or in the launcher. A board (boards.py) is where the ranks find its
address, and `find_board` there chooses the board of a launcher. The store of torchrun's agent is a board, too: it needs
torch, so it is in core/backends/store.py. Each rank connects to the server (member.py), and the ranks gather texts
through it. While they start, the server reports a rank that ends to all others. A server in rank 0 closes when the
`init()` of rank 0 has ended.
"""
