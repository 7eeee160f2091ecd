# dualdist with its examples and Open MPI, on CPUs. Not built: checked with hadolint only.
#
#   docker build --tag dualdist .
#   docker run --rm --shm-size 1g dualdist torchrun --standalone --nproc-per-node 2 examples/train.py
FROM python:3.13-slim-bookworm

RUN apt-get update \
    && apt-get install --yes --no-install-recommends openmpi-bin=4.1.* \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/dualdist
COPY . .
RUN pip install --no-cache-dir --constraint ci/constraints.txt '.[examples,mpi]' && useradd --create-home --uid 1000 user
USER 1000
CMD ["dualdist", "doctor"]
