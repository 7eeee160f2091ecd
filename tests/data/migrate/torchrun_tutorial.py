"""In the style of torch's tutorial "Multi GPU training with DDP", for torchrun."""
import os

import torch
import torch.nn.functional as F
from torch.utils.data import Dataset, DataLoader

from torch.utils.data.distributed import DistributedSampler
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.distributed import init_process_group, destroy_process_group, get_rank


def ddp_setup():
    init_process_group(backend="gloo")


class Trainer:
    def __init__(self, model, data, optimizer):
        self.local_rank = int(os.environ["LOCAL_RANK"])  # set by torchrun
        self.data, self.optimizer = data, optimizer
        self.model = DDP(model)
        self.losses = []

    def _run_epoch(self, epoch):
        self.data.sampler.set_epoch(epoch)
        for source, targets in self.data:
            self.optimizer.zero_grad()
            loss = F.cross_entropy(self.model(source), targets)
            loss.backward()
            self.optimizer.step()
            self.losses.append(loss.item())


def main():
    ddp_setup()
    torch.manual_seed(10)
    data = torch.utils.data.TensorDataset(torch.randn(24, 20), torch.arange(24) % 5)
    loader = DataLoader(data, batch_size=4, pin_memory=False, shuffle=False,
                        sampler=DistributedSampler(data))  # each process has its own part
    model = torch.nn.Linear(20, 5)
    trainer = Trainer(model, loader, torch.optim.SGD(model.parameters(), lr=1e-2))
    for epoch in range(2):
        trainer._run_epoch(epoch)
    print(f"<{get_rank()} {trainer.losses}>", flush=True)
    destroy_process_group()


if __name__ == "__main__":
    main()
