"""A helper in the style of open_clip's: Horovod by an option, else torch.distributed under any launcher it knows."""
import os

import torch
import torch.distributed as dist

try:
    import horovod.torch as hvd
except ImportError:
    hvd = None

NAMES = {
    'local_rank': ('LOCAL_RANK', 'MPI_LOCALRANKID', 'SLURM_LOCALID', 'OMPI_COMM_WORLD_LOCAL_RANK'),
    'rank': ('RANK', 'PMI_RANK', 'SLURM_PROCID', 'OMPI_COMM_WORLD_RANK'),
}


def is_using_distributed():
    size = os.environ.get('WORLD_SIZE', os.environ.get('SLURM_NTASKS', '1'))
    return int(size) > 1


def number_from_env(number):
    return next((int(os.environ[name]) for name in NAMES[number] if name in os.environ), 0)


def init_distributed_device(args):
    args.distributed = args.horovod or is_using_distributed()
    args.rank, args.local_rank = 0, number_from_env('local_rank')
    if args.horovod:
        assert hvd is not None
        hvd.init()
        args.rank, args.local_rank = hvd.rank(), hvd.local_rank()
        os.environ['LOCAL_RANK'] = str(args.local_rank)
    elif args.distributed:
        dist.init_process_group(backend=args.dist_backend, init_method=args.dist_url)
        args.rank = dist.get_rank()
    return torch.device('cpu')
