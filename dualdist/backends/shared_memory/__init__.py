"""Collectives of CPU tensors through memory that ranks of one host share, instead of the loopback network.

`share_host` wraps the Group of another backend if all of its members are on one host. Then reductions of
CPU tensors use shared memory; everything else uses the wrapped group.

memory.py has the memory, mesh.py the sockets by which members wait for each other, rounds.py the collectives, works.py
their order and their threads, and group.py the Group.
"""

from __future__ import annotations

from .group import HostGroup, share_host

__all__ = ("HostGroup", "share_host")
