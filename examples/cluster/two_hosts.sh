#!/usr/bin/env bash
# Trains on two hosts without a scheduler: two processes on the first, one on the second.
#
#     examples/cluster/two_hosts.sh LAUNCHER FIRST SECOND [options of examples/train.py]
#
# LAUNCHER is run, mpirun or torchrun; FIRST and SECOND are host names or addresses. This repository and the interpreter
# PYTHON must be at the same place on both. `run` and `mpirun` are started once, on FIRST, which must be able to
# `ssh SECOND` without a password. torchrun is started on each host: NODE=0 on FIRST, NODE=1 on SECOND.
#
# Which network? Set INTERFACE where a host has several (`ip -brief address` lists them):
#   DUALDIST_INTERFACE    all connections that dualdist and Gloo make; found by itself else
#   NCCL_SOCKET_IFNAME    NCCL, which looks for itself else (NCCL_DEBUG=INFO tells what it found)
#   GLOO_SOCKET_IFNAME    torch's gloo when it runs without dualdist; else the address of the host's name, which on
#                         Debian is 127.0.1.1, where nobody else gets through
#   OMPI_MCA_*            Open MPI, which tries all interfaces that are up
set -euo pipefail
launcher=$1 first=$2 second=$3
shift 3
root=$(cd "$(dirname "$0")/../.." && pwd)
python=${PYTHON:-python}
program=("$root/examples/train.py" "$@")
names=(OMP_NUM_THREADS)
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
if [[ -n ${INTERFACE:-} ]]; then
    export DUALDIST_INTERFACE=$INTERFACE NCCL_SOCKET_IFNAME=$INTERFACE GLOO_SOCKET_IFNAME=$INTERFACE
    export OMPI_MCA_btl_tcp_if_include=$INTERFACE OMPI_MCA_oob_tcp_if_include=$INTERFACE  # mpirun hands on OMPI_MCA_*
    names+=(DUALDIST_INTERFACE NCCL_SOCKET_IFNAME GLOO_SOCKET_IFNAME)
fi

case $launcher in
    run)
        options=()
        for name in "${names[@]}"; do options+=(--env "$name"); done
        exec "$python" -m dualdist run -np 3 -H "$first:2,$second:1" "${options[@]}" "$python" "${program[@]}"
        ;;
    mpirun)
        options=()
        for name in "${names[@]}"; do options+=(-x "$name"); done
        exec mpirun -np 3 -H "$first:2,$second:1" --bind-to none "${options[@]}" "$python" "${program[@]}"
        ;;
    torchrun)
        node=${NODE:?set NODE=0 on the first host and NODE=1 on the second}
        exec "$python" -m torch.distributed.run --nnodes 2 --node-rank "$node" --nproc-per-node $((2 - node)) \
            --master-addr "$first" --master-port "${PORT:-29500}" "${program[@]}"
        ;;
    *)
        echo "LAUNCHER must be run, mpirun or torchrun, but is $launcher instead." >&2
        exit 2
        ;;
esac
