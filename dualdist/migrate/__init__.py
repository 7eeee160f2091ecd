"""The command `dualdist migrate`: what a script of Horovod, DDP or mpi4py needs to run with dualdist."""
