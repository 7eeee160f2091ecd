"""In the style of scripts for torch.distributed.launch, which passed --local_rank."""
import argparse
import os

import torch
import torch.distributed as dist

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", default=-1, type=int)
args = parser.parse_args()


def main():
    assert args.local_rank in (-1, int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(backend="gloo", init_method="env://")
    torch.manual_seed(5)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(torch.randn(2, 3)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print(f"<{dist.get_rank()} {losses}>", flush=True)


if __name__ == "__main__":
    main()
