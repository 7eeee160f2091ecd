"""After, under any launcher: `torchrun --nproc-per-node 2 with_dualdist.py`, or mpirun, srun, horovodrun."""

import torch
from torch.utils.data import DataLoader, TensorDataset

import dualdist as hvd

hvd.init()
device = hvd.device()

torch.manual_seed(0)
inputs = torch.randn(256, 8)
data = TensorDataset(inputs, inputs.sin().sum(1, keepdim=True))
sampler = hvd.DistributedSampler(data)
loader = DataLoader(data, batch_size=16, sampler=sampler)

module = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1)).to(device)
model = hvd.DistributedDataParallel(module)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

for epoch in range(3):
    sampler.set_epoch(epoch)
    losses = hvd.metrics.Mean()
    for x, y in loader:
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x.to(device)), y.to(device))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.update(loss, len(x))
    mean = losses.compute()
    if hvd.rank() == 0:
        print(f"epoch {epoch}: loss {mean:.6f} on {hvd.size()} processes")
