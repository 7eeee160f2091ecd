#!/usr/bin/env bash
#BSUB -J dualdist
#BSUB -n 4
#BSUB -R span[ptile=2]
#BSUB -W 1:00
#BSUB -o %J.out

# Trains on the hosts of an LSF job: -n processes, ptile on each host. For one GPU each, add: #BSUB -gpu num=2
#
#     ARGUMENTS="--epochs 2" PYTHON="$(command -v python)" bsub <examples/cluster/lsf.sh
#
# `dualdist run` finds the hosts in LSB_DJOB_HOSTFILE, and reaches them over ssh. Where this is not allowed, set
# START_WITH=mpirun, with an mpirun that was built for LSF. On machines with jsrun, this is enough:
# `jsrun -n 4 python examples/train.py`. The settings of network interfaces are those of slurm.sbatch.
# This file was never run under LSF; a test runs it with an LSB_DJOB_HOSTFILE of this host.
set -euo pipefail

python=${PYTHON:-python}
read -ra arguments <<<"${ARGUMENTS:-}"
exec "$python" -m dualdist run --start-with "${START_WITH:-ssh}" "$python" examples/train.py "${arguments[@]}"
