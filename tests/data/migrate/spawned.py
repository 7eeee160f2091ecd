"""In the style of torch's ImageNet example: starts a process for each GPU, and computes its rank and the size."""
import argparse
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--nodes", type=int, default=-1)
    parser.add_argument("--node", type=int, default=0)
    args = parser.parse_args()
    if torch.cuda.is_available():
        processes = torch.cuda.device_count()
    else:
        processes = 2
    args.world_size = processes * args.nodes
    args.dist_url = f"file://{tempfile.mktemp()}"
    mp.spawn(main_worker, nprocs=processes, args=(processes, args))


def main_worker(gpu, processes, args):
    args.rank = args.node * processes + gpu
    dist.init_process_group(
        backend="gloo",
        init_method=args.dist_url,
        world_size=args.world_size,
        rank=args.rank,
    )
    torch.manual_seed(3)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.utils.data.TensorDataset(torch.arange(48.0).reshape(12, 4) / 48)
    sampler = torch.utils.data.distributed.DistributedSampler(data, num_replicas=args.world_size, rank=args.rank)
    losses = []
    for (batch,) in torch.utils.data.DataLoader(data, batch_size=4 // processes, sampler=sampler):
        optimizer.zero_grad()
        loss = (model(batch) - 1).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print(f"<{args.rank} {losses}>", flush=True)


if __name__ == "__main__":
    main()
