"""Before: gradients averaged by hand with mpi4py, on CPUs. `mpirun -np 2 python with_mpi4py.py`."""

import torch
from mpi4py import MPI
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

comm = MPI.COMM_WORLD

torch.manual_seed(0)
inputs = torch.randn(256, 8)
data = TensorDataset(inputs, inputs.sin().sum(1, keepdim=True))
sampler = DistributedSampler(data, num_replicas=comm.Get_size(), rank=comm.Get_rank())
loader = DataLoader(data, batch_size=16, sampler=sampler)

model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
for parameter in model.parameters():
    comm.Bcast(parameter.detach().numpy(), root=0)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

for epoch in range(3):
    sampler.set_epoch(epoch)
    total = torch.zeros(())
    for x, y in loader:
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        for parameter in model.parameters():
            comm.Allreduce(MPI.IN_PLACE, parameter.grad.numpy(), op=MPI.SUM)
            parameter.grad /= comm.Get_size()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        total += loss.detach()
    mean = comm.allreduce(total.item() / len(loader)) / comm.Get_size()
    if comm.Get_rank() == 0:
        print(f"epoch {epoch}: loss {mean:.6f} on {comm.Get_size()} processes")
