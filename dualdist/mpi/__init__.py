"""MPI: how its processes meet, and a process group of torch.distributed over mpi4py."""
