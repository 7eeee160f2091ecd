#!/usr/bin/env bash
#flux: --job-name=dualdist
#flux: --nodes=2
#flux: --nslots=4
#flux: --cores-per-slot=1
#flux: --time-limit=1h

# Trains in a job of Flux, with one task per process. Add `#flux: --gpus-per-slot=1` if the nodes have GPUs.
#
#     flux batch examples/cluster/flux.sh [options of examples/train.py]
#
# Each task reads its rank and the world's size from the variables of `flux run`. Tasks on several nodes meet over MPI: they
# need an mpi4py whose MPI Flux can start (flux run -o mpi=...). Else set MASTER_ADDR and MASTER_PORT. The settings of network interfaces are those of slurm.sbatch.
# This file was never run under Flux; a test only reads its options.
set -euo pipefail

exec flux run --nodes=2 --ntasks=4 --cores-per-task=1 "${PYTHON:-python}" examples/train.py "$@"
