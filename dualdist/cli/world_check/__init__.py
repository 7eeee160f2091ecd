"""`dualdist doctor --world`: all processes of a launch meet, and rank 0 reports what is wrong and where.

The processes meet as in dualdist.init(), but join no backend. Their number of messages grows with the logarithm of the
number of hosts: each host measures its links to the hosts 1, 2, 4, ... places after it.
"""

from __future__ import annotations

from .check import check_world

__all__ = ("check_world",)
