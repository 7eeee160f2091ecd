#!/usr/bin/env bash
#PBS -N dualdist
#PBS -l select=2:ncpus=2:mpiprocs=2
#PBS -l walltime=01:00:00
#PBS -j oe

# Trains on the nodes of a PBS job. mpiprocs is the number of processes on each node: add :ngpus=2 for one GPU each.
#
#     qsub -v ARGUMENTS="--epochs 2",PYTHON="$(command -v python)" examples/cluster/pbs.sh
#
# `dualdist run` finds the nodes in PBS_NODEFILE, and reaches them over ssh. Where this is not allowed, add
# START_WITH=pbsdsh or START_WITH=mpirun to -v. The settings of network interfaces are those of slurm.sbatch.
# This file was never run under PBS; a test runs it with a PBS_NODEFILE of this host.
set -euo pipefail

cd "${PBS_O_WORKDIR:-.}"
python=${PYTHON:-python}
read -ra arguments <<<"${ARGUMENTS:-}"
exec "$python" -m dualdist run --start-with "${START_WITH:-ssh}" "$python" examples/train.py "${arguments[@]}"
