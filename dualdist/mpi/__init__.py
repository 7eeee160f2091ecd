"""MPI: how its processes meet, communicators, and a process group of torch.distributed over mpi4py."""
