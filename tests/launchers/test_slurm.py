"""A script in a batch script or an allocation of Slurm runs alone until srun, torchrun or mpirun starts it."""

from __future__ import annotations

SCRIPT = """\
import dualdist
dualdist.init(transport="gloo")
world = dualdist.launcher_name(), dualdist.rank(), dualdist.size(), dualdist.local_rank(), dualdist.local_size()
print("<", *dualdist.allgather_object(world)[dualdist.rank()], ">", flush=True)
"""

BATCH = """\
#!/bin/sh
cd "$1"
"$2" "$3" &&
srun --ntasks-per-node=1 "$4" --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint 127.0.0.1:0 "$3"
"""
