"""In the style of Horovod's examples/pytorch/pytorch_mnist.py."""
import argparse

import torch
import torch.multiprocessing as mp
import torch.nn.functional as F
import torch.optim as optim
import torch.utils.data.distributed
import horovod.torch as hvd  # Horovod

# Training settings
parser = argparse.ArgumentParser(description='PyTorch MNIST Example')
parser.add_argument('--batch-size', type=int, default=4, metavar='N')
parser.add_argument('--lr', type=float, default=0.01)
parser.add_argument('--fp16-allreduce', action='store_true', default=False)
parser.add_argument('--use-adasum', action='store_true', default=False)


def main(args):
    hvd.init()
    torch.manual_seed(42)
    data = torch.utils.data.TensorDataset(torch.randn(32, 6), torch.arange(32) % 3)
    # Horovod: use DistributedSampler to partition data among workers.
    sampler = torch.utils.data.distributed.DistributedSampler(
        data, num_replicas=hvd.size(), rank=hvd.rank())
    loader = torch.utils.data.DataLoader(data, batch_size=args.batch_size, sampler=sampler)

    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    lr_scaler = hvd.size() if not args.use_adasum else 1
    if args.use_adasum and hvd.nccl_built():
        lr_scaler = hvd.local_size()
    optimizer = optim.SGD(model.parameters(), lr=args.lr * lr_scaler, momentum=0.5)

    # Horovod: broadcast parameters & optimizer state.
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    compression = hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none
    optimizer = hvd.DistributedOptimizer(optimizer,
                                         named_parameters=model.named_parameters(),
                                         compression=compression,
                                         op=hvd.Adasum if args.use_adasum else hvd.Average)
    losses = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, target in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), target)
            loss.backward()
            optimizer.step()
            losses.append(hvd.allreduce(loss.detach(), name='avg_loss').item())
    print(f"<{hvd.rank()} {losses}>", flush=True)


if __name__ == '__main__':
    main(parser.parse_args())
