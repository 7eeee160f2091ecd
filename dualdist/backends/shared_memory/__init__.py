"""Collectives of CPU tensors through memory that ranks of one host share, instead of the loopback network.

`share_host` wraps the Group of another backend if a host has several of its members. Then reductions of CPU tensors
use shared memory, and between hosts the network; everything else uses the wrapped group.

memory.py has the memory, mesh.py the sockets by which members wait for each other, rounds.py the collectives of one
host, hierarchy.py those of several hosts, works.py their order and their threads, and group.py the Groups.
"""

from __future__ import annotations

from .group import HierarchicalGroup, HostGroup, share_host

__all__ = ("HierarchicalGroup", "HostGroup", "share_host")
