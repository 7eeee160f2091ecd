"""Learn handwritten digits: `python minimal.py`, or `torchrun --nproc-per-node 2 minimal.py`."""

import torch
from sklearn.datasets import load_digits
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import dualdist as hvd

hvd.init()  # joins the world that the launcher started
torch.manual_seed(0)
pixels, digits = (torch.tensor(array) for array in load_digits(return_X_y=True))
data = TensorDataset(pixels.float() / 16, digits)
sampler = hvd.DistributedSampler(data)  # each process gets its share of the samples
loader = DataLoader(data, batch_size=16, sampler=sampler)

device = hvd.device()  # this process's GPU, or the CPU
model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10)).to(device)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)  # equal weights on all processes
sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
optimizer = hvd.DistributedOptimizer(sgd, named_parameters=model.named_parameters())

for epoch in range(5):
    sampler.set_epoch(epoch)  # another order in each epoch
    losses = hvd.metrics.Mean()
    for images, labels in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images.to(device)), labels.to(device))
        loss.backward()  # from here on, gradients are the mean over all processes
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.update(loss, len(labels))
    mean = losses.compute()  # over the samples of all processes
    if hvd.rank() == 0:
        print(f"epoch {epoch + 1}: loss {mean:.4f} on {hvd.size()} processes")
