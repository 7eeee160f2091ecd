#!/usr/bin/env bash
# Trains on two hosts without a scheduler: two processes on the first, one on the second.
#
#     examples/cluster/two_hosts.sh LAUNCHER FIRST SECOND [options of examples/train.py]
#
# LAUNCHER is run (for `dualdist run`), mpirun or torchrun. FIRST and SECOND are host names or addresses. This
# repository and the interpreter PYTHON must have the same path on both. Start `run` and `mpirun` once, on FIRST, which needs
# `ssh SECOND` without a password. Start torchrun on each host, with NODE=0 on FIRST and NODE=1 on SECOND.
#
# If a host has several networks, set INTERFACE (`ip -brief address` lists them). It sets:
#   DUALDIST_INTERFACE    for all connections of dualdist, Gloo and NCCL; by default dualdist finds an address
#   NCCL_SOCKET_IFNAME    for NCCL in torch scripts without dualdist (NCCL_DEBUG=INFO shows its choice)
#   GLOO_SOCKET_IFNAME    for torch's gloo without dualdist; by default the address of the host's name, which on Debian
#                         is 127.0.1.1 and cannot be reached from other hosts
#   OMPI_MCA_*            for Open MPI; by default it tries all interfaces that are up
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
    export OMPI_MCA_btl_tcp_if_include=$INTERFACE OMPI_MCA_oob_tcp_if_include=$INTERFACE  # mpirun passes OMPI_MCA_* on
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
