"""Collectives of CPU tensors through memory that ranks of one host share, instead of the loopback network.

Members on one host need no network for tensors on the CPU. If there are several hosts or GPUs, `share_host` wraps the
Groups of another backend: reductions of CPU tensors use shared memory, and between hosts the network; everything else
uses the wrapped group.

memory.py has the memory, mesh.py the sockets by which members wait for each other, rounds.py the collectives of one
host, hierarchy.py those of several hosts, works.py their order and their threads, group.py the Groups, and sharing.py
makes them.
"""

from __future__ import annotations

from .group import HierarchicalGroup, HostGroup, ReducingGroup, SharingGroup
from .sharing import share_host

__all__ = ("HierarchicalGroup", "HostGroup", "ReducingGroup", "SharingGroup", "share_host")
